"""The compiled kernels of one process, by worker and size."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

from adaptive.base.revision import Revision
from adaptive.runtime.placement import Placement
from adaptive.runtime.segment import SegmentFunction

from .background_compiler import Job, KernelJob, StepJob
from .compile import compile_segment
from .constants import Constants
from .memory_bound import ADVICE, MemoryBound, bytes_of, no_smaller_one, ran_out_of_memory, temporary_bytes
from .microbatches import Microbatches

KernelSet = dict[int, "Kernel"]  # a kernel per level of the plan
_TRACES = 2  # number of sizes whose traces are kept for other devices of this process


@dataclass(frozen=True)
class Kernel:
    """A compiled segment on one device."""

    run: Callable[..., list[Any]]
    call: SegmentFunction  # its arguments and results; its constants are on the device

    @property
    def batch_bytes(self) -> int:
        """Bytes of the examples that it reads."""
        batch = [
            shape for (kind, *_), shape in zip(self.call.arguments, self.call.shapes, strict=True) if kind == "batch"
        ]
        return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in batch)


def with_constants(call: SegmentFunction, constants: Constants, place: Placement) -> SegmentFunction:
    """Return a segment whose constants are where a worker computes."""
    return call._replace(consts={address: constants.on(place.target, x) for address, x in call.consts.items()})


def compile_kernel(call: SegmentFunction, place: Placement, name: str) -> Kernel:
    """Compile a segment for the place of a worker, where its constants are. `name`: of the program, in profiles."""
    arguments, results = place.arguments(call), place.results(call)
    return Kernel(
        compile_segment(call.run, arguments, place.device, name=name, donate=call.donated, results=results), call
    )


@dataclass
class Counters:
    """The cost of compiling so far. Local to this process."""

    kernels: int = 0
    compile_seconds: float = 0.0
    waited_seconds: float = 0.0  # of steps, or the start


class CompiledKernels:
    """The compiled kernels of this process's workers. Any thread may compile.

    Args:
      calls: returns for a size, by level, what is compiled.
      revision: incremented when kernels change.
      memory: refuses kernels that do not fit the memory; `None` to refuse none.

    Attributes:
      ready: kernels by size, by local index; one dictionary for all workers of one place.
      buckets: the sizes of which all others are composed.
      complete: whether all buckets, including 1, are compiled for all workers, so that any size can be composed.
      temporaries: examples of the first compiled kernel, and the bytes of its temporary arrays; `None` if unknown.
      compile_step: compiles a whole step with these microbatches of each worker, if there are such programs.
    """

    def __init__(
        self,
        calls: Callable[[int], Mapping[int, SegmentFunction]],
        placements: Sequence[Placement],
        revision: Revision,
        name: str,
        memory: MemoryBound | None = None,
    ):
        self.revision, self._name, self._memory = revision, name, memory
        self._segments_of = lru_cache(_TRACES)(calls)
        self.placements = list(placements)
        by_place: defaultdict[Placement, dict[int, KernelSet]] = defaultdict(dict)
        self.ready = [by_place[place] for place in placements]
        self.buckets: set[int] = set()
        self.complete = False
        self.counters, self.constants = Counters(), Constants()
        self.temporaries: tuple[int, int] | None = None
        self.compile_step: Callable[[Microbatches], None] = lambda microbatches: None
        self._trace_lock, self._bucket_lock = threading.Lock(), threading.Lock()

    def carry_out(self, job: Job) -> None:
        """Carry out a job of the background compiler."""
        match job:
            case KernelJob():
                self.compile(job.local_index, job.size)
            case StepJob():
                self.compile_step(job.microbatches)

    def compile(self, local_index: int, size: int) -> None:
        """Compile the kernels of one size, and wait for them."""
        if size in self.ready[local_index]:
            return
        kernels = self._compile_if_it_fits(size, self.placements[local_index])
        if kernels is not None:
            self.ready[local_index][size] = kernels
            self.revision.increment()
        self.add_buckets(())

    def _compile_if_it_fits(self, size: int, place: Placement) -> KernelSet | None:
        """Return the kernels of one size; `None` if they need more memory than there is. Raises an OutOfMemoryError if
        a single example does.
        """
        memory = self._memory
        if memory is not None and not memory.allows(size):
            return None
        try:
            kernels = self._compile(size, place)
        except jax.errors.JaxRuntimeError as error:  # compilers of accelerators allocate memory to try kernels out
            if not ran_out_of_memory(error):
                raise
            if memory is None:
                error.add_note(ADVICE)
                raise
            why = str(error).partition("\n")[0].rstrip(" .:")
            if memory.refuse(size, why):
                return None
            raise no_smaller_one(size, why) from error
        if memory is None:
            return kernels
        programs = [kernel.run for kernel in kernels.values()]
        nbytes = bytes_of(programs, max((kernel.batch_bytes for kernel in kernels.values()), default=0))
        return kernels if memory.admit(size, nbytes) and memory.allows(size) else None

    def add_buckets(self, sizes: Iterable[int]) -> None:
        """Add to the buckets, and update `complete`."""
        with self._bucket_lock:
            self.buckets.update(sizes)
            if self._memory is not None:
                self.buckets.difference_update([size for size in self.buckets if not self._memory.allows(size)])
            self.complete = 1 in self.buckets and all(self.buckets <= ready.keys() for ready in self.ready)

    def drop(self, local_index: int, size: int) -> None:
        """Drop the kernels of one size."""
        self.ready[local_index].pop(size, None)
        self.revision.increment()

    def all_of(self, local_index: int) -> list[Kernel]:
        """Return the kernels of one worker, of all sizes."""
        return [kernel for kernels in list(self.ready[local_index].values()) for kernel in kernels.values()]

    def _compile(self, size: int, place: Placement) -> KernelSet:
        start = time.perf_counter()
        with self._trace_lock:
            traced = self._segments_of(size)
        kernels = {}
        for level, call in traced.items():
            name = f"{self._name}microbatch_{level}_{size}"
            kernels[level] = compile_kernel(with_constants(call, self.constants, place), place, name)
        if self.temporaries is None and (nbytes := temporary_bytes([k.run for k in kernels.values()])) is not None:
            self.temporaries = size, nbytes
        self.counters.kernels += len(kernels)
        self.counters.compile_seconds += time.perf_counter() - start
        return kernels
