"""Kernels per batch size: compiled behind the steps, timed, and put together so that a size changes without a stall.

XLA compiles per shape, for a third of a second to more than one. So the first size is the only compile that anyone
waits for. Behind the steps a *ladder* of kernels (powers of two) is compiled; from then on every size is made of
ladder kernels at once. Kernels are timed on the examples of real steps; a new one is tried with a part of a batch
that has to be computed anyway. A kernel for an exact size is compiled only when that has begun to pay.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ._pieces import Pieces, cheapest, predict

CallSet = dict[int, "Kernel"]  # a kernel per level of the plan
Traced = dict[int, tuple[Callable, Any, tuple[Any, ...]]]  # level -> function, shapes of its inputs, constants
_SAMPLES = 3  # timings of a kernel before it counts as measured; the very first one is dropped
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
      turn: where in the ladder to begin: ranks of one host that share a compilation cache begin at different places.
    """

    def __init__(
        self,
        trace: Callable[[int], Traced],
        devices: Sequence[jax.Device],
        *,
        largest_call: int | None,
        splittable: bool,
        timed: bool,
        turn: int = 0,
    ):
        self.counters = Counters()
        self.largest_call, self.splittable, self.timed = largest_call, splittable, timed
        self._trace, self._traced = trace, {}
        self._workers = [_Worker(device) for device in devices]
        self._turn, self._lock = turn, threading.Lock()
        self._asked: set[tuple[int, int]] = set()
        self._ladder_top = 0
        self._compiler = _BackgroundCompiler(self)

    # --- what a size is made of ---------------------------------------------------------------------------------------

    def can_make(self, local: int, size: int) -> bool:
        """Whether worker `local` of this process can compute `size` examples with no compile."""
        worker = self._workers[local]
        if not self.splittable:
            return size in worker.ready
        return cheapest(size, list(worker.ready), lambda _: 1.0) is not None

    def can_make_all(self) -> bool:
        """Whether every size can be made, now and from now on."""
        return self.splittable and all(1 in w.ready for w in self._workers)

    def pieces(self, local: int, size: int, at_least: int = 1) -> Pieces:
        """The calls that worker `local` makes for `size` examples in this step, at least so many of them."""
        worker = self._workers[local]
        worker.steps_at_size = worker.steps_at_size + 1 if size == worker.size else 0
        worker.size = size
        if not self.splittable:
            return (size,)
        ready = [k for k in list(worker.ready) if k <= size // at_least or at_least > size]
        seconds = self._seconds(worker)
        untried = [k for k in ready if len(worker.samples.get(k, ())) < _SAMPLES] if self.timed else []
        if untried and worker.steps_at_size > 1:
            trial = max(untried)
            rest = cheapest(size - trial, ready, seconds) if size > trial else ()
            if rest is not None:
                return (trial, *rest)
        best = cheapest(size, ready, seconds)
        if best is None:
            best = cheapest(size, list(worker.ready), seconds)
        assert best is not None, f"no kernels for {size} examples: {sorted(worker.ready)}"
        if self.timed and len(best) > 1 and worker.steps_at_size % _RETIME == _RETIME - 1:
            self._consider_exact(local, size, best)
        return best

    def kernel(self, local: int, size: int, level: int) -> Kernel:
        return self._workers[local].ready[size][level]

    def _seconds(self, worker: _Worker) -> Callable[[int], float]:
        measured = worker.measured() if self.timed else {}
        return lambda size: predict(size, measured)

    # --- timing -------------------------------------------------------------------------------------------------------

    def wants_each_timed(self, local: int, pieces: Pieces) -> bool:
        """Whether the calls of this step should be waited for one by one, to time each."""
        if not self.timed or len(set(pieces)) == 1:
            return False
        worker = self._workers[local]
        return worker.steps_at_size % _RETIME == 0 or any(len(worker.samples.get(p, ())) < _SAMPLES for p in pieces)

    def record(self, local: int, size: int, seconds: float) -> None:
        """One timing of one call."""
        samples = self._workers[local].samples
        if size not in samples:  # the first run of a kernel touches its memory for the first time
            samples[size] = deque(maxlen=2 * _SAMPLES + 1)
        else:
            samples[size].append(seconds)

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
        self.extend(max(sizes, default=1))

    def require_calls(self, pieces: Sequence[Pieces]) -> None:
        """Have kernels for these very calls (per worker of this process), waiting for them."""
        for local, sizes in enumerate(pieces):
            for size in set(sizes):
                self._compile(local, size)

    def _first_kernels(self, size: int) -> list[int]:
        top = self.largest_call
        if not self.splittable or not top or size <= top:
            return [size]
        return [top, size % top] if size % top else [top]

    def extend(self, largest: int) -> None:
        """Ask for the ladder that a local batch of `largest` uses. Cheap where it is there already."""
        if not self.splittable or largest <= self._ladder_top:
            return
        top = 1 << (min(largest, self.largest_call or largest).bit_length() - 1)
        known = self._ladder_top
        rungs = [1 << i for i in range(top.bit_length())]
        self._ladder_top = max(known, largest)
        rungs = [r for r in reversed(rungs) if known < r or known == 0]
        turn = self._turn % len(rungs) if rungs else 0
        for rung in rungs[turn:] + rungs[:turn]:
            for local in range(len(self._workers)):
                self._ask(local, rung)

    def ask(self, local: int, size: int) -> None:
        """Have a kernel compiled behind the steps, where `size` cannot be made without."""
        if not self.can_make(local, size):
            for needed in self._first_kernels(size):
                self._ask(local, needed)

    def _ask(self, local: int, size: int) -> None:
        if (local, size) not in self._asked:
            self._asked.add((local, size))
            self._compiler.put(local, size)

    def _compile(self, local: int, size: int) -> None:
        worker = self._workers[local]
        if size in worker.ready:
            return
        start = time.perf_counter()
        with self._lock:
            if size not in self._traced:
                self._traced[size] = self._trace(size)
        kernels = {}
        for level, (function, shapes, consts) in self._traced[size].items():
            run = compile_segment(function, (shapes,), worker.device)
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


class _BackgroundCompiler:
    """One thread, so that the steps lose one core at most. Holds its owner weakly; ends with it, or with the
    process.
    """

    def __init__(self, owner: Kernels):
        self.error: BaseException | None = None
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._owner = weakref.ref(owner)
        self._thread: threading.Thread | None = None

    def put(self, local: int, size: int) -> None:
        self._queue.put((local, size))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adaptive-compiler", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread inside XLA when the interpreter goes would crash it

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            owner = self._owner()
            if owner is None:
                return
            try:
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
        self._queue.put(None)
        thread.join()
        atexit.unregister(self.close)
