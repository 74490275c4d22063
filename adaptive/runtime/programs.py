"""Compiled programs that do not depend on batch sizes: prologues, sums over microbatches, and the final segment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from adaptive.base.reductions import Reduction
from adaptive.graph.plan import Plan

from .compile import compile_segment
from .constants import Constants
from .kernels.memory_bound import ran_out_of_memory
from .message import Layout, accumulate
from .segment import Feed, SegmentFunction, segment_function

Segment = tuple[str, int]  # kind and level
_COMPILED = (
    "Memory ran out while XLA compiled a part of the step that does not depend on the batch size, such as the update "
    "of the state. It needs less memory with an optimizer that holds less, or on a device with more."
)


class _Compilable(NamedTuple):
    """A function to be compiled for each device: see `SegmentFunction`."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    donated: int = 0


class Programs(dict[tuple[str, int, int], Callable[..., Any]]):
    """Compiled programs by kind, level and local index.

    Steps of one microbatch need no sums. So the programs that sum the parts of several microbatches are compiled on
    first use, unless `compile_sums` was called before.

    Args:
      label: prefix of the programs' names.
      devices: one per worker of this process.
      constants: copies arrays to devices.

    Attributes:
      segments: the prologues and the final segment as functions, by kind and level.
      consts: the arrays of the driver's closure that these read, by local index.
    """

    def __init__(
        self,
        plan: Plan,
        feed: Feed,
        layouts: Sequence[Layout],
        devices: Sequence[jax.Device],
        constants: Constants,
        *,
        label: str,
    ):
        super().__init__()
        self._plan, self._layouts = plan, layouts
        self._devices, self._label = devices, label
        # Each function is created once, so that JAX traces it once for all devices.
        self.segments: dict[Segment, SegmentFunction] = {
            **{("prologue", level): segment_function(plan, s, feed, layouts) for level, s in plan.prologues.items()},
            ("final", 0): segment_function(plan, plan.final, feed, layouts),
        }
        self.consts = {
            which: [{address: constants.on(device, x) for address, x in call.consts.items()} for device in devices]
            for which, call in self.segments.items()
        }
        self._sums = self._sum_programs()
        self._lock = threading.Lock()  # the compiler's thread and the steps' thread may need the same sum

    def jobs(self) -> list[Callable[[], None]]:
        """Return jobs that compile the programs of every step; an empty list if they are compiled."""
        if ("final", 0, len(self._devices) - 1) in self:
            return []
        programs = {
            which: _Compilable(segment.run, segment.shapes, segment.donated) for which, segment in self.segments.items()
        }
        return [partial(self._compile, *which, program) for which, program in programs.items()]

    def missing(self, *, with_sums: bool) -> int:
        """Return the number of programs to compile before a first step.

        Args:
          with_sums: whether the step runs several microbatches.
        """
        once = 0 if self else len(self._plan.prologues) + 1 + with_sums * len(self._sums)
        return once * len(self._devices)

    def of(self, local_index: int) -> list[Callable[..., Any]]:
        """Return the compiled programs of one worker."""
        return [program for (_, _, of), program in list(self.items()) if of == local_index]

    def compile_sums(self) -> None:
        """Compile the programs that sum the parts of several microbatches, unless they are compiled."""
        with self._lock:
            for (kind, level), program in self._sums.items():
                self._compile(kind, level, program)

    def _compile(self, kind: str, level: int, program: _Compilable) -> None:
        name = self._label + (kind if kind == "final" else f"{kind}_{level}")
        for local_index, device in enumerate(self._devices):
            if (kind, level, local_index) in self:
                continue
            first = self._devices.index(device)  # the first worker on this device, whose program the others share
            if first < local_index:
                self[kind, level, local_index] = self[kind, level, first]
                continue
            try:
                self[kind, level, local_index] = compile_segment(
                    program.function, program.shapes, device, name=name, donate=program.donated
                )
            except jax.errors.JaxRuntimeError as error:
                if ran_out_of_memory(error):  # compilers of accelerators allocate memory to try programs out
                    error.add_note(_COMPILED)
                raise

    def __missing__(self, key: tuple[str, int, int]) -> Callable[..., Any]:
        if key[:2] not in self._sums:
            raise KeyError(key)
        self.compile_sums()
        return self[key]

    def _sum_programs(self) -> dict[Segment, _Compilable]:
        found = {}
        for level in self._plan.microbatches:
            sent = [part for number in self._plan.sent_at(level) for part in self._layouts[number].parts]
            if sent:
                parts = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in sent]
                added = _adder([p.op for p in sent])
                found["add", level] = _Compilable(added, (*parts, *parts), len(parts))
        return found


def _adder(ops: Sequence[Reduction]) -> Callable[..., list[jax.Array]]:
    """Return a function of the parts of a worker's microbatches so far, and those of a further one."""

    def add(*parts: jax.Array) -> list[jax.Array]:
        return accumulate(ops, parts[: len(ops)], parts[len(ops) :])

    return add
