"""Kernels per batch size: compiled behind the steps, timed, and put together so that a size changes without a stall.

XLA compiles per shape, for a third of a second to more than one. So the first size is the only compile that anyone
waits for. Behind the steps a *ladder* of kernels (powers of two) is compiled; from then on every size is made of
ladder kernels at once. Kernels are timed on the examples of real steps; a new one is tried with a part of a batch
that has to be computed anyway. A kernel for an exact size is compiled only when that has begun to pay.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import jax

from adaptive.base.cores import n_cores
from adaptive.base.thread_status import thread_status

from .background import BackgroundCompiler
from .cache import compile_order
from .calls import Call
from .chooser import NO_CHOICE, Choice, Chooser
from .compile import compile_segment
from .constants import Constants
from .microbatches import GAIN, Microbatches, cheapest

CallSet = dict[int, "Kernel"]  # a kernel per level of the plan
_PRICE_OF_GOING_ON = 1.5  # how much slower a step may be with the kernels there are than with those to come
_TRACES = 2  # that are kept for the other devices of this process
_KEPT = 16  # sizes besides the ladder whose kernels a worker keeps at least
_NO_WORKER = -1  # in the place of one, of what is compiled for all together
_SUMS = 0  # in the place of a size, of the programs that add up several calls
_FEW_CORES = 4  # with fewer, a compiler takes a good part of what the steps have
LARGE_CALL = 32 << 20  # bytes of a call's parts, above which memory decides how a batch is split, and not time
_PASSES = 5  # over a call's parts: the parameters are read, the gradient is written, and added to the sum
_BYTES_PER_SECOND = {"cpu": 10e9}  # of memory, roughly; of other platforms 1e12


@dataclass(frozen=True)
class Kernel:
    """A compiled segment on one device, and the arrays that the driver closed over.

    Attributes:
      run: all of it, or its first stage.
      later: the other stages: programs, and what they take of which earlier one.
      kept: of one that is cut: which outputs of which stage it keeps.
    """

    run: Callable[[dict[str, Any]], dict[str, Any]]
    consts: tuple[Any, ...]
    later: tuple[tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[tuple[int, int], ...]], ...] = ()
    kept: tuple[tuple[int, int], ...] = ()

    @property
    def programs(self) -> tuple[Callable[[dict[str, Any]], dict[str, Any]], ...]:
        """The compiled programs, one per stage."""
        return (self.run, *(program for program, _ in self.later))

    def stages(self, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What each stage brings; the next one is dispatched when it is asked for."""
        brought = [self.run(given)]
        yield brought[0]
        for program, takes in self.later:
            crossing = {"crossing": [brought[stage]["outputs"][i] for stage, i in takes]} if takes else {}
            brought.append(program({**given, **crossing}))
            yield brought[-1]

    def outputs(self, brought: Sequence[dict[str, Any]]) -> list[Any]:
        """Of what the stages brought, what is kept."""
        if not self.later:
            return brought[0]["outputs"]
        return [brought[stage]["outputs"][i] for stage, i in self.kept]


@dataclass
class Counters:
    """What compiling has cost. Local to this process."""

    kernels: int = 0
    compile_seconds: float = 0.0
    waited_seconds: float = 0.0  # that a step, or the start, stood still for a compiler


@dataclass
class _Worker:
    """The kernels of one worker of this process, and how its calls are chosen."""

    device: jax.Device
    ready: dict[int, CallSet] = field(default_factory=dict)
    changes: int = 0  # of `ready`
    chooser: Chooser = field(default_factory=Chooser)
    used: dict[int, None] = field(default_factory=dict)  # sizes of calls, those used last at the end
    asked: int = 0  # the size that was asked for last
    current: int = 0  # the size of the steps until then
    exact: int = 0  # the size that a kernel of its own was asked for last

    def take(self, microbatches: Microbatches) -> None:
        """Note that these are used from now on."""
        for size in set(microbatches):
            self.used.pop(size, None)
            self.used[size] = None


@dataclass(frozen=True)
class KernelOptions:
    """How kernels are chosen, and in which order they are compiled.

    Attributes:
      largest_call: the most examples in one call (`microbatch=`), or `None`.
      timed: whether microbatches are chosen by measured time, and exact kernels compiled; else by size alone, so that
        results do not depend, in their last bits, on how fast the machine was.
      resizable: whether sizes change from step to step; if not, nothing is compiled but what is required.
      compile_order: which of how many processes this is that share a compilation cache: they compile different kernels
        first.
    """

    largest_call: int | None = None
    timed: bool = True
    resizable: bool = True
    compile_order: tuple[int, int] = (0, 1)


class Kernels:
    """The call kernels of this process's workers.

    Args:
      calls: of a size, by level: what is to be compiled.
      devices: one per worker of this process.
      splittable: whether a local batch may run as several calls; if not, every size needs a kernel of its own.
      least_calls: calls that every step needs at least, from the first one on.
      call_bytes: of the gradient and all else that a call computes to be sent. Above `LARGE_CALL` a step makes as few
        calls as possible, because one of several calls holds the gradient twice.
      name: what the programs' names begin with, in profiles.

    What a step asks is kept in attributes, so that a step in which nothing has changed makes no call.

    Attributes:
      choices: the calls of each worker of this process in its next step. An entry is replaced, also by the compiler's
        thread, when it has to be asked for again (`choose`).
      busy: whether kernels may be compiled beside the steps. While it is false, `check` and `step_ended` need not be
        called.
      makes_all: whether every size can be made, now and from now on.
      call_examples: what one more call costs, as the number of examples that take as long: the mean of this process's
        workers that have timed calls; `None` if none has. 0 where batches cannot be split.
      least_calls: as that is for the sizes that are asked about next.
      compile_step: compiles a whole step of this size for all workers, where there are such programs.
      compile_sums: compiles the programs that add up several calls.
      compiled: by size and by when it began, when it was done; infinite for what is under way. By the clock of
        `time.perf_counter`.
    """

    def __init__(
        self,
        calls: Callable[[int], Mapping[int, Call]],
        devices: Sequence[jax.Device],
        *,
        splittable: bool,
        least_calls: int = 1,
        call_bytes: int = 0,
        options: KernelOptions = KernelOptions(),
        name: str = "",
    ):
        self._name = name
        self.counters = Counters()
        self.compiled: dict[tuple[int, float], float] = {}
        self.largest_call, self.timed = options.largest_call, options.timed
        self.resizable, self.splittable, self.least_calls = options.resizable, splittable, least_calls
        self._calls = calls
        self._traced: dict[int, Mapping[int, Call]] = {}
        self.constants = Constants()
        large = call_bytes if call_bytes > LARGE_CALL else 0
        price = _PASSES * large / _BYTES_PER_SECOND.get(devices[0].platform, 1e12)
        self._workers = [_Worker(d, chooser=Chooser(fewest=large > 0, call_seconds=price)) for d in devices]
        self.compile_order, self._lock = options.compile_order, threading.Lock()
        self._versions = itertools.count(1)
        self._ladder: set[int] = set()
        self._ladder_lock = threading.Lock()
        self.choices: list[Choice] = [NO_CHOICE] * len(devices)
        self.busy = self.makes_all = False
        self.call_examples: float | None = None if splittable else 0.0
        self.few_cores = devices[0].platform == "cpu" and n_cores() < _FEW_CORES
        self.compile_step: Callable[[int], None] = lambda size: None
        self.compile_sums: Callable[[], None] = lambda: None
        self._compiler = BackgroundCompiler(self, pauses=self.few_cores)

    # --- what a size is made of ---------------------------------------------------------------------------------------

    def can_make(self, local: int, size: int) -> bool:
        """Whether worker `local` of this process can compute `size` examples with no compile."""
        worker = self._workers[local]
        if size == 0:
            return True
        if self.splittable and not self.timed:  # by size alone: a kernel of this very size may not be what is taken
            return worker.ready.keys() >= set(self._fixed(size, self.least_calls))
        if not self.splittable or size in worker.ready:
            return size in worker.ready
        return self._can_go_on(worker.chooser.cost(size, list(worker.ready)), size, worker.chooser)

    def _update_makes_all(self, more: Iterable[int] = ()) -> None:
        """Bring `makes_all` up to date, and the ladder by these sizes."""
        with self._ladder_lock:
            self._ladder.update(more)
            whole = 1 in self._ladder and all(self._ladder <= w.ready.keys() for w in self._workers)
            self.makes_all = self.splittable and whole

    def may_split(self, local: int, size: int) -> bool:
        """Return whether a step of worker `local` may run `size` examples as several calls, as far as is known now."""
        if not self.splittable or size < 2:
            return False
        if not self.timed:
            return len(self._fixed(size, self.least_calls)) > 1
        if self._first_kernels(size) != [size]:
            return True
        worker = self._workers[local]
        return self.resizable and (not worker.chooser.fewest or (bool(worker.ready) and size not in worker.ready))

    def can_join(self) -> bool:
        """Whether a process can take a step as soon as it comes in. Where a batch is one call, any new size has to be
        compiled by all it is new to, and which one it will be is only known then.
        """
        return not self.splittable or self.makes_all

    def microbatches(self, local: int, size: int, at_least: int = 1) -> Microbatches:
        """The calls that worker `local` makes for `size` examples in this step, at least so many of them."""
        choice = self.choices[local]
        if choice.steps and choice.size == size and choice.at_least == at_least:
            choice.steps -= 1
        else:
            choice = self.choose(local, size, at_least)
        return choice.microbatches

    def choose(self, local: int, size: int, at_least: int) -> Choice:
        """Choose the calls of worker `local` for the next step, and for as many behind it as the choice says."""
        worker = self._workers[local]
        chooser, changes = worker.chooser, worker.changes
        if size == 0:
            choice = chooser.fixed(0, at_least, ())
        elif not self.splittable:
            choice = chooser.fixed(size, at_least, (size,))
        elif not self.timed:
            choice = chooser.fixed(size, at_least, self._fixed(size, at_least))
        else:
            choice = chooser.choose(size, at_least, list(worker.ready), quiet=self._compiler.idle)
            if len(choice.microbatches) > 1 and not choice.trial and self.resizable:
                self._consider_exact(local, size, choice.microbatches)
            self.call_examples = self._examples_of_a_call()
        worker.take(choice.microbatches)
        self.choices[local] = choice
        if worker.changes != changes:  # a kernel has come while these were chosen
            self.choices[local] = NO_CHOICE
        return choice

    def choice(self, local: int) -> Choice:
        """Return the choice that the step under way was begun with."""
        return self._workers[local].chooser.choice

    def _fixed(self, size: int, at_least: int) -> Microbatches:
        """Calls by size alone, whatever is compiled: it would tell what sizes there were before, and how long ago."""
        top = min(self.largest_call or size, -(-size // at_least))
        if not self.resizable:
            return (top,) * (size // top) + ((size % top,) if size % top else ())
        calls = cheapest(size, [1 << i for i in range(top.bit_length())], lambda k: 1.0)
        assert calls is not None, "one of the kernels is for one example"
        return calls

    def all_of(self, local: int) -> list[Kernel]:
        """The kernels that worker `local` of this process has, of all sizes. Called from any thread."""
        return [kernel for kernels in list(self._workers[local].ready.values()) for kernel in kernels.values()]

    def kernel(self, local: int, size: int, level: int) -> Kernel:
        return self._workers[local].ready[size][level]

    # --- timing -------------------------------------------------------------------------------------------------------

    def record_step(self, local: int, seconds: float) -> None:
        """Take the seconds of all calls of a step, from where the step begins to where its parts are computed.

        Ignored unless the choice is to be `timed`.
        """
        self.record(local, 0, seconds)

    def record(self, local: int, size: int, seconds: float) -> None:
        """Take the seconds of one call of a step; of its only one, those of the step (`record_step`).

        Ignored unless the choice is to be `timed`.
        """
        chooser = self._workers[local].chooser
        chooser.record(0 if chooser.choice.microbatches == (size,) else size, seconds)
        if not self.busy:
            chooser.step_ended(disturbed=False)

    def tried_at_a_loss(self, local: int) -> bool:
        """Whether the last step of worker `local` tried calls, and took longer than its examples have to."""
        worker = self._workers[local]
        return worker.chooser.tried_at_a_loss(list(worker.ready))

    def _examples_of_a_call(self) -> float | None:
        known = [cost for w in self._workers if (cost := w.chooser.times.examples_of_a_call()) is not None]
        return sum(known) / len(known) if known else None

    def _consider_exact(self, local: int, size: int, microbatches: Microbatches) -> None:
        """Compile a kernel for this very size if, were it to last as long again, that would have paid."""
        worker = self._workers[local]
        if size in worker.ready or (self.largest_call and size > self.largest_call) or not self.counters.kernels:
            return
        measured = worker.chooser.times.seconds
        if not set(microbatches) <= set(measured):
            return
        now = sum(measured[p] for p in microbatches)
        one_call = measured[max(microbatches)] / max(microbatches) * size
        price = self.counters.compile_seconds / self.counters.kernels
        if (now - one_call) * worker.chooser.steps_at_size > price:
            if worker.exact not in self._ladder:
                self._compiler.drop(local, worker.exact)
            worker.exact = size
            self._let_go(local)
            self._put(local, size)

    # --- compiling ----------------------------------------------------------------------------------------------------

    def step_ended(self) -> bool:
        """Note the end of a step. Returns whether its seconds are not the machine's, for a compiler beside it."""
        beside = self._compiler.step_ended()
        disturbed = beside and self.few_cores
        for worker in self._workers:
            worker.chooser.step_ended(disturbed=disturbed)
        self.busy = beside or not self._compiler.idle or self._compiler.error is not None
        return disturbed

    def require(self, sizes: Sequence[int]) -> None:
        """Have what `sizes` (one per worker of this process) need, waiting for it; then build the ladder behind the
        steps.
        """
        start = time.perf_counter()
        self.require_first(sizes)
        self.counters.waited_seconds += time.perf_counter() - start
        self.extend(max(sizes))

    def require_first(self, sizes: Sequence[int]) -> None:
        """Have what `sizes` (one per worker of this process) need. Takes its time."""
        for local, size in enumerate(sizes):
            if not self.can_make(local, size):
                for needed in self._first_kernels(size):
                    self.compile(local, needed)

    def require_calls(self, microbatches: Sequence[Microbatches]) -> None:
        """Have kernels for these very calls (per worker of this process), waiting for them."""
        for local, sizes in enumerate(microbatches):
            for size in set(sizes):
                self.compile(local, size)

    def missing(self, sizes: Sequence[int]) -> int:
        """How many kernels `require` would wait for."""
        return sum(
            len(self._first_kernels(size))
            for local, size in enumerate(sizes)
            if size and not self.can_make(local, size)
        )

    def _first_kernels(self, size: int) -> list[int]:
        top = min(self.largest_call or size, -(-size // self.least_calls))
        if not self.splittable:
            return [size]
        if not self.timed:
            return sorted(set(self._fixed(size, self.least_calls)))
        if size <= top:
            return [size]
        return [top, size % top] if size % top else [top]

    def extend(self, largest: int) -> None:
        """Ask for the ladder that a local batch of `largest` uses. Cheap where it is there already."""
        if not (self.splittable and self.resizable):
            return
        top = min(largest, self.largest_call or largest).bit_length()
        missing = [1 << i for i in reversed(range(top)) if 1 << i not in self._ladder]
        if not missing or self._is_long_enough():
            return
        self._update_makes_all(missing)
        wanted = [k for k in missing if not all(k in worker.ready for worker in self._workers)]
        coarse = [k for k in wanted if k in self._coarse_ladder]
        for kernels in (coarse, [k for k in wanted if k not in coarse]):
            self._put_shared(range(len(self._workers)), kernels)

    @property
    def _coarse_ladder(self) -> set[int]:
        """Every second rung from the longest one down, and that of one example: half of the kernels make every size, of
        a few calls more. So they come first.
        """
        return {*sorted(self._ladder, reverse=True)[::2], 1}

    def _put_shared(self, workers: Iterable[int], kernels: Sequence[int], *, urgent: bool = False) -> None:
        """Put kernels in that processes which share a cache compile together: each begins with its part of them."""
        for size in compile_order(kernels, *self.compile_order):
            for local in workers:
                self._put(local, size, urgent=urgent)

    def _is_long_enough(self) -> bool:
        """Whether the longest rung is no faster, by example, than the one before it: then nor is a longer one."""
        if len(self._ladder) < 2 or not self.timed:
            return False
        last, longest = sorted(self._ladder)[-2:]
        measured = [w.chooser.times.seconds for w in self._workers]
        return all(longest in m and last in m and m[longest] > 2 * GAIN * m[last] for m in measured)

    def ask(self, sizes: Sequence[int], current: Sequence[int]) -> None:
        """Have compiled next, behind the steps, what `sizes` (one per worker of this process) cannot be made without.

        Takes the place of what was asked for before: where that has not begun, it is not compiled any more.

        Args:
          current: the sizes of the next step.
        """
        for local, size in enumerate(sizes):
            worker = self._workers[local]
            worker.current = current[local]
            if worker.asked == size:
                continue
            if not self.splittable:
                self._compiler.drop(local, worker.asked)
            worker.asked = size
            self._let_go(local)
            if not self.can_make(local, size):
                missing = set(self._soonest_kernels(worker, size)) - worker.ready.keys()
                self._put_shared([local], sorted(missing, reverse=True), urgent=True)

    def _soonest_kernels(self, worker: _Worker, size: int) -> Sequence[int]:
        """Kernels that can make a size soon: those that are there, and few others."""
        if not (self.splittable and self.timed):
            return self._first_kernels(size)
        chooser = worker.chooser
        for kernels in ({*worker.ready, *self._coarse_ladder}, self._ladder):
            calls = cheapest(size, kernels, chooser.times.predict)
            if calls is not None and self._can_go_on(chooser.cost(size, kernels), size, chooser):
                return calls
        return self._first_kernels(size)

    def _can_go_on(self, cost: float, size: int, chooser: Chooser) -> bool:
        """Whether calls of this cost will do for a size: a few more than the whole ladder would need are a price for
        going on at once; hundreds are not.
        """
        return cost <= _PRICE_OF_GOING_ON * chooser.cost(size, self._ladder) < inf

    def _put(self, local: int, size: int, *, urgent: bool = False) -> None:
        if size not in self._workers[local].ready:
            self.busy = True
            self._compiler.put(local, size, urgent=urgent)

    def _let_go(self, local: int) -> None:
        """Forget kernels that were used longest ago, so that memory does not grow with every size there ever was.

        Never what the next steps may take: the ladder, the calls of the last step, the current size, and the one that
        was asked for, which this process may already have told the others it can make. Called between the steps
        alone, by their thread.
        """
        worker = self._workers[local]
        if self.splittable and not (1 in self._ladder and self._ladder <= worker.ready.keys()):
            return  # what cannot be made of the ladder yet may have to be made of these
        needed = {*self._ladder, *worker.chooser.choice.microbatches, worker.current, worker.asked, worker.exact}
        since = {size: when for when, size in enumerate(worker.used)}
        spare = sorted((s for s in list(worker.ready) if s not in needed), key=lambda s: since.get(s, -1))
        for size in spare[: max(0, len(spare) - _KEPT)]:
            for known in (worker.ready, worker.used):
                known.pop(size, None)
            worker.chooser.forget(size)
            self._has_changed(local)

    def ask_for_step(self, size: int) -> None:
        """Have `compile_step(size)` called in the background, before the kernels that are not waited for."""
        self._compiler.put(_NO_WORKER, size, urgent=True)

    def ask_for_sums(self) -> None:
        """Have `compile_sums` called in the background, before the kernels of which sizes are made."""
        if self.splittable and self.resizable:
            self._compiler.put(_NO_WORKER, _SUMS, urgent=True)

    def is_one_call(self, size: int) -> bool:
        """Return whether a first step of this size is one kernel call."""
        return self._first_kernels(size) == [size]

    def compile(self, local: int, size: int) -> None:
        """Have the kernels of one size, waiting for them."""
        if local == _NO_WORKER:
            if size == _SUMS:
                self.compile_sums()
            else:
                self.compile_step(size)
            return
        worker = self._workers[local]
        if size in worker.ready:
            return
        same_device = [w.ready.get(size) for w in self._workers if w.device == worker.device]
        there = next((kernels for kernels in same_device if kernels is not None), None)
        kernels = self._compiled(size, worker.device) if there is None else there  # stand-ins on one device share them
        worker.ready[size] = kernels
        self._has_changed(local)
        self._update_makes_all()

    def _has_changed(self, local: int) -> None:
        """Have the calls of a worker chosen again: its kernels are others. Called from any thread."""
        self._workers[local].changes = next(self._versions)
        self.choices[local] = NO_CHOICE

    def _compiled(self, size: int, device: jax.Device) -> CallSet:
        start = time.perf_counter()
        self.compiled[size, start] = inf
        with self._lock:
            if size not in self._traced:
                self._traced[size] = self._calls(size)
                while len(self._traced) > _TRACES:
                    del self._traced[next(iter(self._traced))]
            traced = self._traced[size]
        kernels = {}
        for level, call in traced.items():
            name = f"{self._name}call_{level}_{size}"
            run = compile_segment(call.function, (call.shapes,), device, name=name)
            later = tuple(
                (compile_segment(s.function, (s.shapes,), device, name=f"{name}_stage_{number}"), s.takes)
                for number, s in enumerate(call.later, 2)
            )
            consts = tuple(self.constants.on(device, c) for c in call.consts)
            kernels[level] = Kernel(run, consts, later, call.kept)
        self.compiled[size, start] = end = time.perf_counter()
        self.counters.kernels += len(kernels)
        self.counters.compile_seconds += end - start
        return kernels

    @property
    def warm(self) -> bool:
        """Whether all that was asked for is compiled."""
        return self._compiler.idle

    @property
    def rungs(self) -> tuple[int, int]:
        """How many sizes the worker that has fewest can make by a kernel of their own, and how many of them are wanted.
        Asked from any thread.
        """
        there = min(len(worker.ready) for worker in self._workers)
        return there, there + self._compiler.most_waiting()

    @thread_status("waiting for kernels", compiles=True)
    def finish(self) -> None:
        """Wait until all that was asked for is compiled."""
        with self._compiler.without_pauses():
            while not self.warm:
                self.check()
                time.sleep(0.005)

    def check(self) -> None:
        """Raise what the background compiler met."""
        if self._compiler.error is not None:
            raise self._compiler.error

    def close(self) -> None:
        """Compile no more behind the steps. Does not wait for what is being compiled."""
        self._compiler.close()
