"""The programs of an engine that are compiled once, whatever the sizes of batches are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .compile import compile_segment


class Compilable(NamedTuple):
    """What is to be compiled for each device."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    donate: bool = False


class Programs(dict[tuple[str, int, int], Callable[..., Any]]):
    """Compiled programs by kind, level, and worker of this process.

    A first step of one kernel call adds up nothing. So the programs that add up the parts of several calls are compiled
    when they are used, unless `compile_sums` was called before.

    Args:
      label: what names of programs begin with.
      devices: one per worker of this process.
      sums: programs that add up parts, by kind and level.
    """

    def __init__(self, label: str, devices: Sequence[jax.Device], sums: Mapping[tuple[str, int], Compilable]):
        super().__init__()
        self._label, self._devices, self.sums = label, devices, sums
        self._lock = threading.Lock()  # the compiler's thread and that of the steps may want one sum

    def compile(self, kind: str, level: int, program: Compilable) -> None:
        """Compile a program for all workers of this process, unless it is there."""
        name = self._label + (kind if kind == "final" else f"{kind}_{level}")
        for local, device in enumerate(self._devices):
            if (kind, level, local) not in self:
                self[kind, level, local] = compile_segment(
                    program.function, program.shapes, device, name=name, donate=program.donate
                )

    def compile_sums(self) -> None:
        """Compile the programs that add up the parts of several calls, unless they are there."""
        with self._lock:
            for (kind, level), program in self.sums.items():
                self.compile(kind, level, program)

    def __missing__(self, key: tuple[str, int, int]) -> Callable[..., Any]:
        if key[:2] not in self.sums:
            raise KeyError(key)
        self.compile_sums()
        return self[key]
