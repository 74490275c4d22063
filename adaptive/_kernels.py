"""Kernels per batch size: compiled behind the steps, timed, and put together so that a size changes without a stall.

XLA compiles per shape, for a third of a second to more than one. So the first size is the only compile that anyone
waits for. Behind the steps a *ladder* of kernels (powers of two) is compiled; from then on every size is made of
ladder kernels at once. Kernels are timed on the examples of real steps; a new one is tried with a part of a batch
that has to be computed anyway. A kernel for an exact size is compiled only when that has begun to pay.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import jax
import numpy as np

from ._cache import in_turn
from ._pieces import GAIN, Pieces, cheapest, predict
from ._surroundings import settings_here

CallSet = dict[int, "Kernel"]  # a kernel per level of the plan
Traced = dict[int, tuple[Callable, Any, tuple[Any, ...]]]  # level -> function, shapes of its inputs, constants
_SAMPLES = 3  # timings of a kernel before it counts as measured
_PRICE_OF_GOING_ON = 1.5  # how much slower a step may be with the kernels there are than with those to come
_RETIME = 64  # steps between two timings of a mixed batch


@dataclass(frozen=True)
class Kernel:
    """A compiled segment on one device, and the arrays that the driver closed over."""

    run: Callable[[dict[str, Any]], dict[str, Any]]
    consts: tuple[Any, ...]


@dataclass
class Counters:
    """What compiling has cost. Local to this process."""

    kernels: int = 0
    compile_seconds: float = 0.0
    waited_seconds: float = 0.0  # that a step, or the start, stood still for a compiler


@dataclass
class _Worker:
    """What is there for one worker of this process."""

    device: jax.Device
    ready: dict[int, CallSet] = field(default_factory=dict)
    samples: dict[int, deque] = field(default_factory=dict)
    size: int = 0
    steps_at_size: int = 0
    timings: int = 0  # how many sizes are measured, or were so since the last choice
    chosen: tuple[tuple, Pieces] | None = None

    def measured(self) -> dict[int, float]:
        """Seconds by size. The least of the last timings: what else runs on the machine slows all sizes alike, and a
        small call that happened to run undisturbed must not look better than a large one that did not."""
        return {s: min(t) for s, t in list(self.samples.items()) if len(t) >= _SAMPLES}


def compile_segment(function: Callable, shapes: Any, device: jax.Device, donate: bool = False) -> Callable:
    """Compile ahead of time, for one device."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)
    jitted = jax.jit(function, donate_argnums=(0,)) if donate else jax.jit(function)
    return jitted.lower(*placed).compile()


class Kernels:
    """The call kernels of this process's workers.

    Args:
      trace: traces and plans the driver for a size: per level, the function, the shapes of its inputs, its constants.
      devices: one per worker of this process.
      largest_call: the most examples in one call (`microbatch=`), or `None`.
      splittable: whether a local batch may run as several calls; if not, every size needs a kernel of its own.
      timed: whether pieces are chosen by measured time, and exact kernels compiled; else by size alone, so that
        results do not depend, in their last bits, on how fast the machine was.
      least_calls: calls that every step needs at least, from the first one on.
      turn: which of how many ranks this is: those that share a compilation cache compile different kernels first.
    """

    def __init__(
        self,
        trace: Callable[[int], Traced],
        devices: Sequence[jax.Device],
        *,
        largest_call: int | None,
        splittable: bool,
        timed: bool,
        least_calls: int = 1,
        turn: tuple[int, int] = (0, 1),
    ):
        self.counters = Counters()
        self.largest_call, self.splittable, self.timed = largest_call, splittable, timed
        self.least_calls = least_calls
        self._trace = trace
        self._traced: dict[int, Traced] = {}
        self._workers = [_Worker(device) for device in devices]
        self._turn, self._lock = turn, threading.Lock()
        self._asked: set[tuple[int, int]] = set()
        self._urgent: set[tuple[int, int]] = set()
        self._ladder: set[int] = set()
        self._compiler = _BackgroundCompiler(self)

    # --- what a size is made of ---------------------------------------------------------------------------------------

    def can_make(self, local: int, size: int) -> bool:
        """Whether worker `local` of this process can compute `size` examples with no compile."""
        worker = self._workers[local]
        if not self.splittable or size in worker.ready:
            return size in worker.ready
        # A few calls more than the whole ladder would need are a price for going on at once; hundreds are not.
        measured = worker.measured() if self.timed else {}
        now, then = (self._cost(size, rungs, measured) for rungs in (list(worker.ready), self._ladder))
        return now <= _PRICE_OF_GOING_ON * then < inf

    @staticmethod
    def _cost(size: int, kernels: Iterable[int], measured: Mapping[int, float]) -> float:
        calls = cheapest(size, kernels, lambda k: predict(k, measured))
        return inf if calls is None else sum(predict(k, measured) for k in calls)

    def can_make_all(self) -> bool:
        """Whether every size can be made, now and from now on."""
        return self.splittable and 1 in self._ladder and all(self._ladder <= w.ready.keys() for w in self._workers)

    def pieces(self, local: int, size: int, at_least: int = 1) -> Pieces:
        """The calls that worker `local` makes for `size` examples in this step, at least so many of them."""
        worker = self._workers[local]
        worker.steps_at_size = worker.steps_at_size + 1 if size == worker.size else 0
        worker.size = size
        if not self.splittable:
            return (size,)
        known = (size, at_least, len(worker.ready), worker.timings, worker.steps_at_size // _RETIME)
        if worker.chosen is None or worker.chosen[0] != known:
            worker.chosen = (known, self._choose(local, size, at_least))
        return worker.chosen[1]

    def _choose(self, local: int, size: int, at_least: int) -> Pieces:
        worker = self._workers[local]
        ready = [k for k in list(worker.ready) if k <= -(-size // at_least)]
        measured = worker.measured() if self.timed else {}
        untried = [k for k in ready if k not in measured and k <= size] if self.timed else []
        if untried and worker.steps_at_size > 1:
            # A new kernel is tried on a part of the batch, which has to be computed anyway.
            trial = max(untried)
            rest = cheapest(size - trial, ready, lambda k: predict(k, measured)) if size > trial else ()
            if rest is not None:
                return (trial, *rest)
        best = cheapest(size, ready, lambda k: predict(k, measured))
        if best is None:
            best = cheapest(size, list(worker.ready), lambda k: predict(k, measured))
        assert best is not None, f"no kernels for {size} examples: {sorted(worker.ready)}"
        if self.timed and len(best) > 1:
            self._consider_exact(local, size, best)
        return best

    def kernel(self, local: int, size: int, level: int) -> Kernel:
        return self._workers[local].ready[size][level]

    # --- timing -------------------------------------------------------------------------------------------------------

    def wants_each_timed(self, local: int, pieces: Pieces) -> bool:
        """Whether the calls of this step should be waited for one by one, to time each."""
        if not self.timed or len(set(pieces)) == 1:
            return False
        worker = self._workers[local]
        return worker.steps_at_size % _RETIME == 0 or any(len(worker.samples.get(p, ())) < _SAMPLES for p in pieces)

    def record(self, local: int, size: int, seconds: float) -> None:
        """One timing of one call."""
        worker = self._workers[local]
        samples = worker.samples.setdefault(size, deque(maxlen=2 * _SAMPLES + 1))
        samples.append(seconds)
        worker.timings += len(samples) <= _SAMPLES

    def _consider_exact(self, local: int, size: int, pieces: Pieces) -> None:
        """Compile a kernel for this very size if, were it to last as long again, that would have paid."""
        worker = self._workers[local]
        if size in worker.ready or (self.largest_call and size > self.largest_call) or not self.counters.kernels:
            return
        measured = worker.measured()
        if not set(pieces) <= set(measured):
            return
        now = sum(measured[p] for p in pieces)
        one_call = measured[max(pieces)] / max(pieces) * size
        price = self.counters.compile_seconds / self.counters.kernels
        if (now - one_call) * worker.steps_at_size > price:
            self._ask(local, size)

    # --- compiling ----------------------------------------------------------------------------------------------------

    def require(self, sizes: Sequence[int]) -> None:
        """Have what `sizes` (one per worker of this process) need, waiting for it; then build the ladder behind the
        steps.
        """
        start = time.perf_counter()
        for local, size in enumerate(sizes):
            if not self.can_make(local, size):
                for needed in self._first_kernels(size):
                    self._compile(local, needed)
        self.counters.waited_seconds += time.perf_counter() - start
        self.extend(max(sizes))

    def require_calls(self, pieces: Sequence[Pieces]) -> None:
        """Have kernels for these very calls (per worker of this process), waiting for them."""
        for local, sizes in enumerate(pieces):
            for size in set(sizes):
                self._compile(local, size)

    def _first_kernels(self, size: int) -> list[int]:
        top = min(self.largest_call or size, -(-size // self.least_calls))
        if not self.splittable or size <= top:
            return [size]
        return [top, size % top] if size % top else [top]

    def extend(self, largest: int) -> None:
        """Ask for the ladder that a local batch of `largest` uses. Cheap where it is there already."""
        if not self.splittable:
            return
        top = min(largest, self.largest_call or largest).bit_length()
        missing = [1 << i for i in reversed(range(top)) if 1 << i not in self._ladder]
        if not missing or self._is_long_enough():
            return
        self._ladder.update(missing)
        for rung in in_turn(missing, *self._turn):
            for local in range(len(self._workers)):
                self._ask(local, rung)

    def _is_long_enough(self) -> bool:
        """Whether the longest rung is no faster, by example, than the one before it: then nor is a longer one."""
        if len(self._ladder) < 2 or not self.timed:
            return False
        last, longest = sorted(self._ladder)[-2:]
        measured = [w.measured() for w in self._workers]
        return all(longest in m and last in m and m[longest] > 2 * GAIN * m[last] for m in measured)

    def ask(self, local: int, size: int) -> None:
        """Have compiled next, behind the steps, what `size` cannot be made without."""
        if self.can_make(local, size):
            return
        pieces = cheapest(size, self._ladder, lambda k: predict(k, {})) if self.splittable else (size,)
        for needed in sorted(set(pieces or ())):
            self._ask(local, needed, urgent=True)

    def _ask(self, local: int, size: int, *, urgent: bool = False) -> None:
        known = self._urgent if urgent else self._asked
        if size in self._workers[local].ready or (local, size) in known:
            return
        self._asked.add((local, size))
        known.add((local, size))
        self._compiler.put(local, size, urgent=urgent)

    def _compile(self, local: int, size: int) -> None:
        worker = self._workers[local]
        if size in worker.ready:
            return
        twins = [w for w in self._workers if w.device == worker.device and size in w.ready]
        if twins:  # stand-ins on one device share their kernels
            worker.ready[size] = twins[0].ready[size]
            return
        start = time.perf_counter()
        with self._lock:
            if size not in self._traced:
                self._traced[size] = self._trace(size)
        kernels = {}
        for level, (function, shapes, consts) in self._traced[size].items():
            run = compile_segment(function, (shapes,), worker.device)
            if worker.device.platform == "cpu":
                _run_once(run, shapes)
            kernels[level] = Kernel(run, tuple(jax.device_put(c, worker.device) for c in consts))
        worker.ready[size] = kernels
        self.counters.kernels += len(kernels)
        self.counters.compile_seconds += time.perf_counter() - start

    @property
    def warm(self) -> bool:
        """Whether all that was asked for is compiled."""
        return all(size in self._workers[local].ready for local, size in tuple(self._asked))

    def finish(self) -> None:
        """Wait until all that was asked for is compiled."""
        while not self.warm:
            self.check()
            time.sleep(0.005)

    def check(self) -> None:
        """Raise what the background compiler met."""
        if self._compiler.error is not None:
            raise self._compiler.error

    def close(self) -> None:
        self._compiler.close()


def _run_once(run: Callable, shapes: Any) -> None:
    """A kernel's first run touches its memory for the first time, which no step should wait for."""
    if not any(jax.dtypes.issubdtype(s.dtype, jax.dtypes.extended) for s in jax.tree.leaves(shapes)):
        jax.block_until_ready(run(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes)))


_END = (-1, -1, None)  # comes before all that is asked for


def _end(items: queue.PriorityQueue, _owner: object) -> None:
    items.put(_END)


class _BackgroundCompiler:
    """One thread, so that the steps lose one core at most. Holds its owner weakly; ends with it, or with the
    process.
    """

    def __init__(self, owner: Kernels):
        self.error: BaseException | None = None
        self._queue: queue.PriorityQueue = queue.PriorityQueue()
        self._count = itertools.count()
        self._settings = settings_here()
        self._owner = weakref.ref(owner, partial(_end, self._queue))
        self._thread: threading.Thread | None = None

    def put(self, local: int, size: int, *, urgent: bool = False) -> None:
        self._queue.put((0 if urgent else 1, next(self._count), (local, size)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adaptive-compiler", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread inside XLA when the interpreter goes would crash it

    def _run(self) -> None:
        while (item := self._queue.get()[-1]) is not None:
            owner = self._owner()
            if owner is None:
                return
            try:
                with self._settings():
                    owner._compile(*item)
            except BaseException as error:  # raised in the step that follows, by check()
                self.error = error
                return
            del owner

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._owner = lambda: None  # type: ignore[assignment]
        self._queue.put(_END)
        thread.join()
        atexit.unregister(self.close)
