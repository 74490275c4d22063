"""The kernels of one process: compiles kernels in the background, and chooses those for each batch.

XLA compiles per shape, which takes a third of a second or more. The program waits only for the first size. Kernels for
*buckets* (powers of two) are compiled in the background; from then on every size is composed of buckets. A size that
has stayed for some time gets a kernel of its own. The rule is in `runtime/kernels/microbatches.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from adaptive.base.process.cores import n_cores
from adaptive.base.process.thread_status import thread_status
from adaptive.base.revision import Revision
from adaptive.runtime.placement import Placement
from adaptive.runtime.segment import SegmentFunction

from .background_compiler import BackgroundCompiler, KernelJob, StepJob
from .compiled import CompiledKernels, Kernel
from .memory_bound import MemoryBound
from .microbatches import Microbatches, by_size_alone, fewest, largest_in_cache, missing_buckets

_MORE = 2  # maximum ratio of the number of microbatches of the compiled kernels to that with all buckets
_KEPT = 16  # number of sizes, besides buckets and those in use, whose kernels a worker keeps
_FEW_CORES = 4  # with fewer cores, a compiler slows the steps down


@dataclass(frozen=True)
class KernelOptions:
    """How kernels are chosen, and in which order they are compiled.

    Attributes:
      largest_microbatch: the most examples in one microbatch (`microbatch=`), or `None`.
      deterministic: whether microbatches are chosen by size alone, so that the last bits of results do not depend on
        when a kernel is compiled.
      resizable: whether sizes change from step to step; if not, only required kernels are compiled.
      memory: bounds microbatches by memory, if they are bounded so.
    """

    largest_microbatch: int | None = None
    deterministic: bool = False
    resizable: bool = True
    memory: MemoryBound | None = None


_DEFAULTS = KernelOptions()


@dataclass
class _Worker:
    """The sizes that one worker uses."""

    asked: int = 0  # last, by `Kernels.ask`
    current: int = 0  # until that is in force
    own: int = 0  # the last one for which a kernel of its own was requested
    microbatches: Microbatches = ()


class Kernels:
    """The kernels of this process's workers.

    Args:
      calls: returns for a size, by level, what is compiled.
      splittable: whether a local batch may run as several microbatches; if not, every size needs a kernel of its own.
      min_microbatches: how many microbatches every step has at least, from the first one on.
      microbatch_bytes: bytes of the gradient and all other parts of messages that a microbatch writes.
      name: prefix of the names of programs, in profiles.
      revision: incremented when `choose` may choose others.

    Attributes:
      busy: whether kernels may be compiled beside the steps. While it is false, `check` and `step_ended` need not be
        called.
    """

    def __init__(
        self,
        calls: Callable[[int], Mapping[int, SegmentFunction]],
        placements: Sequence[Placement],
        *,
        splittable: bool,
        min_microbatches: int = 1,
        microbatch_bytes: int = 0,
        options: KernelOptions = _DEFAULTS,
        name: str = "",
        revision: Revision | None = None,
    ):
        self.compiled = CompiledKernels(calls, placements, revision or Revision(), name, options.memory)
        self._largest_microbatch, self.memory = options.largest_microbatch, options.memory
        self.deterministic, self._microbatch_bytes = options.deterministic, microbatch_bytes
        self.resizable, self.splittable, self.min_microbatches = options.resizable, splittable, min_microbatches
        self._workers = [_Worker() for _ in placements]
        self.busy = False
        self._on_cpu = placements[0].device.platform == "cpu"
        self.few_cores = self._on_cpu and n_cores() < _FEW_CORES
        self._compiler = BackgroundCompiler(self.compiled, pauses=self.few_cores)

    @property
    def largest_microbatch(self) -> int | None:
        """The most examples in one microbatch, by `microbatch=` and by memory; `None` without either. Local."""
        by_memory = None if self.memory is None else self.memory.largest
        return min((n for n in (self._largest_microbatch, by_memory) if n is not None), default=None)

    @property
    def _limit(self) -> int | None:
        """The most examples in a microbatch, by settings, by memory, and on CPUs by the cache; `None` without any."""
        largest, known = self.largest_microbatch, self.compiled.temporaries
        if not self._on_cpu or self.deterministic or not self.resizable or known is None:
            return largest
        in_cache = largest_in_cache(*known, self._microbatch_bytes)
        return in_cache if largest is None else min(largest, in_cache)

    # --- composition of sizes -----------------------------------------------------------------------------------------

    @property
    def makes_all(self) -> bool:
        """Whether every size can be composed, now and from now on."""
        return self.compiled.complete

    def can_make(self, local_index: int, size: int) -> bool:
        """Return whether a worker can compute `size` examples without a compile."""
        ready = self.compiled.ready[local_index]
        if not size or self.deterministic or not self.splittable:  # may not use a kernel of this size
            return not size or ready.keys() >= set(self.fixed_microbatches(size))
        return size in ready or self._few(size, list(ready), self.min_microbatches) is not None

    def _few(self, size: int, kernels: Iterable[int], at_least: int) -> Microbatches | None:
        """Return the fewest microbatches of these kernels, if they are not many more than with all buckets."""
        limit, found = self._limit, fewest(size, kernels, at_least)
        whole = fewest(size, [k for k in self.compiled.buckets if limit is None or k <= limit], at_least)
        return found if found is not None and whole is not None and len(found) <= _MORE * len(whole) else None

    def can_join(self) -> bool:
        """Return whether a process can run a step as soon as it joins, or not before it knows its size."""
        return not self.splittable or self.makes_all

    def fixed_microbatches(self, size: int, at_least: int = 0, *, by_memory: bool = True) -> Microbatches:
        """Return the microbatches of a worker that do not depend on which kernels are compiled; replicated unless this
        process's memory bounds them.
        """
        if not (self.splittable and size):
            return (size,)
        largest = self.largest_microbatch if by_memory else self._largest_microbatch
        resizable = self.deterministic and self.resizable
        return by_size_alone(size, at_least or self.min_microbatches, largest, resizable=resizable)

    def choose(self, local_index: int, size: int, at_least: int = 1) -> Microbatches:
        """Choose the microbatches of a worker for `size` examples, while the revision stays; at least `at_least`."""
        if size == 0:
            microbatches: Microbatches = ()
        elif self.deterministic or not self.splittable:
            microbatches = self.fixed_microbatches(size, at_least)
        else:
            microbatches = self._of_compiled(local_index, size, at_least)
        self._workers[local_index].microbatches = microbatches
        return microbatches

    def _of_compiled(self, local_index: int, size: int, at_least: int) -> Microbatches:
        """Return the fewest microbatches of compiled kernels: of those within `_limit`, if these make not many more."""
        ready, limit = list(self.compiled.ready[local_index]), self._limit
        found = None if limit is None else self._few(size, [k for k in ready if k <= limit], at_least)
        found = found or fewest(size, ready, at_least) or fewest(size, ready)
        assert found is not None, "the kernels for a size in force are not dropped"
        return found

    def ask_for_own(self, local_index: int, size: int, at_least: int = 1) -> None:
        """Compile a kernel for a size that has stayed, in the background, if it may run as one microbatch."""
        worker, limit = self._workers[local_index], self._limit
        if not (self.splittable and self.resizable and size) or self.deterministic or at_least > 1:
            return
        if worker.own == size or size in self.compiled.ready[local_index] or (limit is not None and size > limit):
            return
        if worker.own not in self.compiled.buckets:
            self._compiler.drop(KernelJob(local_index, worker.own))
        worker.own = size
        self._evict(local_index)
        self._put(local_index, size)

    def kernel(self, local_index: int, size: int, level: int) -> Kernel:
        """Return a compiled kernel."""
        return self.compiled.ready[local_index][size][level]

    def step_ended(self) -> bool:
        """Record the end of a step. Returns whether a compiler disturbed it, so that its seconds must be ignored."""
        beside = self._compiler.step_ended()
        self.busy = beside or not self._compiler.idle or self._compiler.error is not None
        return beside and self.few_cores

    # --- compiling ----------------------------------------------------------------------------------------------------

    def require(self, sizes: Sequence[int]) -> None:
        """Compile the kernels for `sizes` (by local index), and wait for them; then the buckets in the background."""
        start = time.perf_counter()
        self.require_first(sizes)
        self.compiled.counters.waited_seconds += time.perf_counter() - start
        self.extend(max(sizes))

    def require_first(self, sizes: Sequence[int]) -> None:
        """Compile the kernels for `sizes` (by local index), and wait for them."""
        for local_index, size in enumerate(sizes):
            bound: int | None = 0
            while not self.can_make(local_index, size) and bound != self.largest_microbatch:
                bound = self.largest_microbatch  # lower afterwards, if a kernel was too large for the memory
                for needed in sorted(set(self.fixed_microbatches(size))):
                    self.compiled.compile(local_index, needed)

    def require_microbatches(self, microbatches: Sequence[Microbatches]) -> None:
        """Compile kernels for exactly these microbatches (by local index), and wait for them."""
        for local_index, sizes in enumerate(microbatches):
            for size in set(sizes):
                self.compiled.compile(local_index, size)

    def extend(self, largest: int) -> None:
        """Compile the buckets for local batches up to `largest` in the background. Cheap if they exist."""
        if not (self.splittable and self.resizable):
            return
        buckets = self.compiled.buckets
        missing = missing_buckets(largest, self._limit, buckets)
        if not missing:
            return
        self.compiled.add_buckets(missing)
        wanted = [k for k in missing if not all(k in ready for ready in self.compiled.ready)]
        for size in wanted:
            for local_index in range(len(self._workers)):
                self._put(local_index, size)

    def ask(self, sizes: Sequence[int], current: Sequence[int]) -> None:
        """Compile the kernels for `sizes` next, in the background; cancels an earlier request, unless its compile has
        started. `current`: the sizes of the next step. By local index.
        """
        for local_index, size in enumerate(sizes):
            worker = self._workers[local_index]
            worker.current = current[local_index]
            if worker.asked == size:
                continue
            if not self.splittable:
                self._compiler.drop(KernelJob(local_index, worker.asked))
            worker.asked = size
            self._evict(local_index)
            if not self.can_make(local_index, size):
                ready, found = self.compiled.ready[local_index], None
                if self.splittable and not self.deterministic:
                    found = self._few(size, {*ready, *self.compiled.buckets}, self.min_microbatches)
                missing = set(found or self.fixed_microbatches(size)) - ready.keys()
                for needed in sorted(missing, reverse=True):
                    self._put(local_index, needed, urgent=True)

    def _put(self, local_index: int, size: int, *, urgent: bool = False) -> None:
        if size not in self.compiled.ready[local_index]:
            self.busy = True
            self._compiler.put(KernelJob(local_index, size), urgent=urgent)

    def _evict(self, local_index: int) -> None:
        """Drop the kernels that no worker at a worker's place needs. Called between steps only, by their thread.

        Keeps what the next steps may use: also the requested size, which this process may have announced as ready.
        """
        buckets, ready = self.compiled.buckets, self.compiled.ready[local_index]
        if self.splittable and not (1 in buckets and buckets <= ready.keys()):
            return  # sizes may still need these kernels until the buckets are complete
        needed = set(buckets)
        for worker, of_worker in zip(self._workers, self.compiled.ready, strict=True):
            if of_worker is ready:
                needed |= {*worker.microbatches, worker.current, worker.asked, worker.own}
        spare = [size for size in ready if size not in needed]  # the oldest first
        for size in spare[: max(0, len(spare) - _KEPT)]:
            self.compiled.drop(local_index, size)

    def ask_for_step(self, microbatches: Microbatches) -> None:
        """Queue `CompiledKernels.compile_step(microbatches)` in the background, before kernels that are not urgent."""
        self._compiler.put(StepJob(microbatches), urgent=True)

    # --- the background compiler --------------------------------------------------------------------------------------

    @property
    def warm(self) -> bool:
        """Whether all requested kernels are compiled."""
        return self._compiler.idle

    @thread_status("waiting for kernels", compiles=True)
    def finish(self) -> None:
        """Wait until all requested kernels are compiled. Raises the error of the background compiler."""
        self._compiler.finish()
        self.check()

    def check(self) -> None:
        """Raise the error of the background compiler, if it has failed."""
        if self._compiler.error is not None:
            raise self._compiler.error

    def close(self) -> None:
        """End the background compiler after its current compile. Does not wait."""
        self._compiler.close()
