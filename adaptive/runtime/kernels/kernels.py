"""The kernels of one process: compiles kernels in the background, and chooses those for each batch.

XLA compiles per shape, which takes a third of a second or more. The program waits only for the first size. Kernels for
*buckets* (powers of two) are compiled in the background; from then on every size is composed of buckets. Kernels are
timed in real steps. A kernel for an exact size is compiled only if it saves more time than its compilation takes.

One class requests, times and evicts kernels, because all three use the same state; it conducts the other modules here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

import jax

from adaptive.base.cores import n_cores
from adaptive.base.thread_status import thread_status
from adaptive.runtime.cache import compile_order
from adaptive.runtime.microbatch_segments import MicrobatchSegment
from adaptive.runtime.microbatches import Microbatches, cheapest

from .background_compiler import BackgroundCompiler
from .buckets import by_size_alone, coarse_buckets, larger_gains_nothing, missing_buckets
from .choice import NO_CHOICE, Choice, Chooser
from .compiled import NO_WORKER, SUMS, CompiledKernels, Counters, Kernel
from .options import KernelOptions
from .worker_kernels import WorkerKernels

_PRICE_OF_GOING_ON = 1.5  # maximum ratio of a step's time with the current kernels to that with all buckets
_FEW_CORES = 4  # with fewer cores, a compiler slows the steps down
LARGE_MICROBATCH = 32 << 20  # bytes; above it microbatches are chosen to save memory, not time
_DEFAULTS = KernelOptions()
_PASSES = 5  # passes over memory: parameters are read, the gradient is written and added to the sum
_BYTES_PER_SECOND = {"cpu": 10e9}  # memory bandwidth, approximately; 1e12 on other platforms


class Kernels:
    """The kernels of this process's workers.

    Args:
      calls: returns for a size, by level, what is compiled.
      devices: one per worker of this process.
      splittable: whether a local batch may run as several microbatches; if not, every size needs a kernel of its own.
      min_microbatches: how many microbatches every step has at least, from the first one on.
      microbatch_bytes: bytes of the gradient and all other parts of messages that a microbatch writes. Above
        `LARGE_MICROBATCH` a step runs as few microbatches as possible, because with several the gradient is in memory
        twice.
      name: prefix of the names of programs, in profiles.

    Results that steps need are kept in attributes, so that a step without changes makes no Python call.

    Attributes:
      compiled: the compiled kernels.
      choices: the microbatches of each worker in its next step. Replaced by `NO_CHOICE`, also by the compiler's thread,
        when `choose` must be called again.
      busy: whether kernels may be compiled beside the steps. While it is false, `check` and `step_ended` need not be
        called.
      overhead_examples: the cost of one more microbatch, as the number of examples that take as long: the mean over
        this process's workers that have timed microbatches; `None` if none has. 0 where batches cannot be split.
      min_microbatches: as given; may be changed between steps.
    """

    def __init__(
        self,
        calls: Callable[[int], Mapping[int, MicrobatchSegment]],
        devices: Sequence[jax.Device],
        *,
        splittable: bool,
        min_microbatches: int = 1,
        microbatch_bytes: int = 0,
        options: KernelOptions = _DEFAULTS,
        name: str = "",
    ):
        self.choices: list[Choice] = [NO_CHOICE] * len(devices)
        self.compiled = CompiledKernels(calls, devices, self.choices, name, options.memory)
        self._largest_microbatch, self.timed, self.memory = options.largest_microbatch, options.timed, options.memory
        self.resizable, self.splittable, self.min_microbatches = options.resizable, splittable, min_microbatches
        self.compile_order = options.compile_order
        large = microbatch_bytes if microbatch_bytes > LARGE_MICROBATCH else 0
        price = _PASSES * large / _BYTES_PER_SECOND.get(devices[0].platform, 1e12)
        self._workers = [WorkerKernels(Chooser(fewest=large > 0, overhead_seconds=price)) for _ in devices]
        self.busy = False
        self.overhead_examples: float | None = None if splittable else 0.0
        self.few_cores = devices[0].platform == "cpu" and n_cores() < _FEW_CORES
        self._compiler = BackgroundCompiler(self.compiled, pauses=self.few_cores)

    @property
    def counters(self) -> Counters:
        """The cost of compiling so far."""
        return self.compiled.counters

    @property
    def largest_microbatch(self) -> int | None:
        """The most examples in one microbatch, by `microbatch=` and by memory; `None` without either. Local."""
        by_memory = None if self.memory is None else self.memory.largest
        return min((n for n in (self._largest_microbatch, by_memory) if n is not None), default=None)

    # --- composition of sizes -----------------------------------------------------------------------------------------

    @property
    def makes_all(self) -> bool:
        """Whether every size can be composed, now and from now on."""
        return self.compiled.complete

    def can_make(self, local_index: int, size: int) -> bool:
        """Return whether a worker can compute `size` examples without a compile."""
        ready = self.compiled.ready[local_index]
        if size == 0:
            return True
        if self.splittable and not self.timed:  # the choice by size may not use a kernel of this size
            return ready.keys() >= set(self._by_size_alone(size, self.min_microbatches))
        if not self.splittable or size in ready:
            return size in ready
        chooser = self._workers[local_index].chooser
        return self._can_go_on(chooser.cost(size, list(ready)), size, chooser)

    def may_split(self, local_index: int, size: int) -> bool:
        """Return whether a worker may run `size` examples as several microbatches, as far as is known now."""
        if not self.splittable or size < 2:
            return False
        if not self.timed:
            return len(self._by_size_alone(size, self.min_microbatches)) > 1
        if not self.is_one_microbatch(size):
            return True
        ready, chooser = self.compiled.ready[local_index], self._workers[local_index].chooser
        return self.resizable and (not chooser.fewest or (bool(ready) and size not in ready))

    def can_join(self) -> bool:
        """Return whether a process can run a step as soon as it joins.

        If a batch is one microbatch, it must compile a kernel for its size, which is unknown before it joins.
        """
        return not self.splittable or self.makes_all

    def is_one_microbatch(self, size: int) -> bool:
        """Return whether a first step of this size is one microbatch."""
        return self._first_kernels(size) == [size]

    def may_be_one_microbatch(self, size: int) -> bool:
        """Return what `is_one_microbatch` does, by settings alone, whatever the memory permits. Replicated."""
        return self._kernels_up_to(self._largest_microbatch, size) == [size]

    def microbatches(self, local_index: int, size: int, at_least: int = 1) -> Microbatches:
        """Return the microbatches for `size` examples of a worker in this step; at least `at_least` of them."""
        choice = self.choices[local_index]
        if choice.steps and choice.size == size and choice.at_least == at_least:
            choice.steps -= 1
        else:
            choice = self.choose(local_index, size, at_least)
        return choice.microbatches

    def choose(self, local_index: int, size: int, at_least: int) -> Choice:
        """Choose the microbatches of a worker for the next step, and the number of steps for which they are valid."""
        worker, changes = self._workers[local_index], self.compiled.changes[local_index]
        chooser = worker.chooser
        if size == 0:
            choice = chooser.fixed(0, at_least, ())
        elif not self.splittable:
            choice = chooser.fixed(size, at_least, (size,))
        elif not self.timed:
            choice = chooser.fixed(size, at_least, self._by_size_alone(size, at_least))
        else:
            ready = list(self.compiled.ready[local_index])
            choice = chooser.choose(size, at_least, ready, quiet=self._compiler.idle)
            if len(choice.microbatches) > 1 and not choice.trial and self.resizable:
                self._consider_exact(local_index, size, choice.microbatches)
            self.overhead_examples = self._overhead_examples()
        worker.note_used(choice.microbatches)
        self.choices[local_index] = choice
        if self.compiled.changes[local_index] != changes:  # a kernel was added meanwhile
            self.choices[local_index] = NO_CHOICE
        return choice

    def choice(self, local_index: int) -> Choice:
        """Return the choice of the current step."""
        return self._workers[local_index].chooser.choice

    def _by_size_alone(self, size: int, at_least: int) -> Microbatches:
        return by_size_alone(size, at_least, self.largest_microbatch, resizable=self.resizable)

    def kernel(self, local_index: int, size: int, level: int) -> Kernel:
        """Return a compiled kernel."""
        return self.compiled.ready[local_index][size][level]

    # --- timing -------------------------------------------------------------------------------------------------------

    def record_step(self, local_index: int, seconds: float) -> None:
        """Record the seconds of all microbatches of a step: from its start until its parts are computed.

        Ignored unless the choice is to be `timed`.
        """
        self.record(local_index, 0, seconds)

    def record(self, local_index: int, size: int, seconds: float) -> None:
        """Record the seconds of one microbatch; of a step's only one, those of the step (`record_step`).

        Ignored unless the choice is to be `timed`.
        """
        chooser = self._workers[local_index].chooser
        chooser.record(0 if chooser.choice.microbatches == (size,) else size, seconds)
        if not self.busy:
            chooser.step_ended(disturbed=False)

    def tried_at_a_loss(self, local_index: int) -> bool:
        """Return whether the last step of a worker was a trial that took longer than the best microbatches."""
        return self._workers[local_index].chooser.tried_at_a_loss(list(self.compiled.ready[local_index]))

    def step_ended(self) -> bool:
        """Record the end of a step. Returns whether a compiler disturbed it, so that its seconds must be ignored."""
        beside = self._compiler.step_ended()
        disturbed = beside and self.few_cores
        for worker in self._workers:
            worker.chooser.step_ended(disturbed=disturbed)
        self.busy = beside or not self._compiler.idle or self._compiler.error is not None
        return disturbed

    def _overhead_examples(self) -> float | None:
        known = [cost for w in self._workers if (cost := w.chooser.times.overhead_examples()) is not None]
        return sum(known) / len(known) if known else None

    def _consider_exact(self, local_index: int, size: int, microbatches: Microbatches) -> None:
        """Compile a kernel for this exact size, if it would have saved its compilation time in the steps so far."""
        worker, counters = self._workers[local_index], self.counters
        too_large = self.largest_microbatch is not None and size > self.largest_microbatch
        if size in self.compiled.ready[local_index] or too_large or not counters.kernels:
            return
        if worker.chooser.saved_by_exact(size, microbatches) > counters.compile_seconds / counters.kernels:
            if worker.exact not in self.compiled.buckets:
                self._compiler.drop(local_index, worker.exact)
            worker.exact = size
            self._evict(local_index)
            self._put(local_index, size)

    # --- compiling ----------------------------------------------------------------------------------------------------

    def require(self, sizes: Sequence[int]) -> None:
        """Compile the kernels for `sizes`, and wait for them; then compile the buckets in the background.

        Args:
          sizes: by local index.
        """
        start = time.perf_counter()
        self.require_first(sizes)
        self.counters.waited_seconds += time.perf_counter() - start
        self.extend(max(sizes))

    def require_first(self, sizes: Sequence[int]) -> None:
        """Compile the kernels for `sizes` (by local index), and wait for them."""
        for local_index, size in enumerate(sizes):
            self._require_first(local_index, size)

    def _require_first(self, local_index: int, size: int) -> None:
        while not self.can_make(local_index, size):
            bound = self.largest_microbatch
            for needed in self._first_kernels(size):
                self.compiled.compile(local_index, needed)
            if self.largest_microbatch == bound:
                return
            # A kernel was too large for the memory: it takes smaller ones.

    def halve(self, size: int, why: str, sizes: Sequence[int]) -> bool:
        """Run microbatches of less than `size` examples, which ran out of memory. Compiles smaller kernels, and waits
        for them. Called by the thread of the steps.

        Args:
          why: the error.
          sizes: examples of each worker, by local index.

        Returns:
          Whether that is possible.
        """
        if self.memory is None or not self.splittable or not self.memory.refuse(size, why):
            return False
        assert self.memory.largest is not None, "it was lowered"
        self.compiled.drop_above(self.memory.largest)
        for local_index in range(len(self._workers)):
            self._workers[local_index].chooser.forget(size)
        self.require_first(sizes)
        return True

    def require_microbatches(self, microbatches: Sequence[Microbatches]) -> None:
        """Compile kernels for exactly these microbatches (by local index), and wait for them."""
        for local_index, sizes in enumerate(microbatches):
            for size in set(sizes):
                self.compiled.compile(local_index, size)

    def missing(self, sizes: Sequence[int]) -> int:
        """Return the number of kernels that `require` would wait for."""
        return sum(
            len(self._first_kernels(size))
            for local_index, size in enumerate(sizes)
            if size and not self.can_make(local_index, size)
        )

    def _first_kernels(self, size: int) -> list[int]:
        return self._kernels_up_to(self.largest_microbatch, size)

    def _kernels_up_to(self, largest: int | None, size: int) -> list[int]:
        top = min(largest or size, -(-size // self.min_microbatches))
        if not self.splittable:
            return [size]
        if not self.timed:
            return sorted(set(by_size_alone(size, self.min_microbatches, largest, resizable=self.resizable)))
        if size <= top:
            return [size]
        return [top, size % top] if size % top else [top]

    def extend(self, largest: int) -> None:
        """Compile the buckets for local batches up to `largest` in the background. Cheap if they exist."""
        if not (self.splittable and self.resizable):
            return
        buckets = self.compiled.buckets
        missing = missing_buckets(largest, self.largest_microbatch, buckets)
        measured = [w.chooser.times.seconds for w in self._workers]
        if not missing or (self.timed and larger_gains_nothing(buckets, measured)):
            return
        self.compiled.add_buckets(missing)
        wanted = [k for k in missing if not all(k in ready for ready in self.compiled.ready)]
        coarse = [k for k in wanted if k in coarse_buckets(buckets)]
        for kernels in (coarse, [k for k in wanted if k not in coarse]):
            self._put_shared(range(len(self._workers)), kernels)

    def _put_shared(self, workers: Iterable[int], kernels: Sequence[int], *, urgent: bool = False) -> None:
        """Queue kernels that several processes compile for one cache; each process starts with its own part."""
        for size in compile_order(kernels, *self.compile_order):
            for local_index in workers:
                self._put(local_index, size, urgent=urgent)

    def ask(self, sizes: Sequence[int], current: Sequence[int]) -> None:
        """Compile the kernels for `sizes` next, in the background. Cancels an earlier request, unless its compile has
        started.

        Args:
          sizes: by local index.
          current: the sizes of the next step.
        """
        for local_index, size in enumerate(sizes):
            worker = self._workers[local_index]
            worker.current = current[local_index]
            if worker.asked == size:
                continue
            if not self.splittable:
                self._compiler.drop(local_index, worker.asked)
            worker.asked = size
            self._evict(local_index)
            if not self.can_make(local_index, size):
                missing = set(self._soonest_kernels(local_index, size)) - self.compiled.ready[local_index].keys()
                self._put_shared([local_index], sorted(missing, reverse=True), urgent=True)

    def _soonest_kernels(self, local_index: int, size: int) -> Sequence[int]:
        """Return the kernels for a size that needs as few new compilations as acceptable for its cost."""
        if not (self.splittable and self.timed):
            return self._first_kernels(size)
        chooser, buckets = self._workers[local_index].chooser, self.compiled.buckets
        for kernels in ({*self.compiled.ready[local_index], *coarse_buckets(buckets)}, buckets):
            found = cheapest(size, kernels, chooser.times.predict)
            if found is not None and self._can_go_on(chooser.cost(size, kernels), size, chooser):
                return found
        return self._first_kernels(size)

    def _can_go_on(self, cost: float, size: int, chooser: Chooser) -> bool:
        """Return whether microbatches of this cost are acceptable for a size until all buckets are compiled."""
        return cost <= _PRICE_OF_GOING_ON * chooser.cost(size, self.compiled.buckets) < inf

    def _put(self, local_index: int, size: int, *, urgent: bool = False) -> None:
        if size not in self.compiled.ready[local_index]:
            self.busy = True
            self._compiler.put(local_index, size, urgent=urgent)

    def _evict(self, local_index: int) -> None:
        """Drop the kernels that a worker does not need. Called between steps only, by their thread."""
        buckets, ready = self.compiled.buckets, self.compiled.ready[local_index]
        if self.splittable and not (1 in buckets and buckets <= ready.keys()):
            return  # sizes may still need these kernels until the buckets are complete
        for size in self._workers[local_index].forget_outdated(list(ready), buckets):
            self.compiled.drop(local_index, size)

    def ask_for_step(self, size: int) -> None:
        """Queue `CompiledKernels.compile_step(size)` in the background, before kernels that are not urgent."""
        self._compiler.put(NO_WORKER, size, urgent=True)

    def ask_for_sums(self) -> None:
        """Queue `CompiledKernels.compile_sums` in the background, before the kernels of buckets."""
        if self.splittable and self.resizable:
            self._compiler.put(NO_WORKER, SUMS, urgent=True)

    # --- the background compiler --------------------------------------------------------------------------------------

    @property
    def warm(self) -> bool:
        """Whether all requested kernels are compiled."""
        return self._compiler.idle

    @property
    def buckets_compiled(self) -> tuple[int, int]:
        """(Compiled kernels of the worker with fewest, number it will have). May be read from any thread."""
        compiled = min(map(len, self.compiled.ready))
        return compiled, compiled + self._compiler.most_waiting()

    @thread_status("waiting for kernels", compiles=True)
    def finish(self) -> None:
        """Wait until all requested kernels are compiled.

        Raises:
          Exception: the error of the background compiler.
        """
        with self._compiler.without_pauses():
            while not self.warm:
                self.check()
                time.sleep(0.005)

    def check(self) -> None:
        """Raise the error of the background compiler, if it has failed."""
        if self._compiler.error is not None:
            raise self._compiler.error

    def close(self) -> None:
        """End the background compiler after its current compile. Does not wait."""
        self._compiler.close()
