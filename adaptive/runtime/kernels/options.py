"""`KernelOptions`: the settings of a program that decide which kernels it compiles."""

from __future__ import annotations

from dataclasses import dataclass

from .memory_bound import MemoryBound


@dataclass(frozen=True)
class KernelOptions:
    """How kernels are chosen, and in which order they are compiled.

    Attributes:
      largest_microbatch: the most examples in one microbatch (`microbatch=`), or `None`.
      deterministic: whether microbatches are chosen by size alone, so that the last bits of results do not depend on
        when a kernel is compiled.
      resizable: whether sizes change from step to step; if not, only required kernels are compiled.
      compile_order: (index, count) of this process among those that share a compilation cache: they compile different
        kernels first.
      memory: bounds microbatches by memory, if they are bounded so.
    """

    largest_microbatch: int | None = None
    deterministic: bool = False
    resizable: bool = True
    compile_order: tuple[int, int] = (0, 1)
    memory: MemoryBound | None = None
