"""The background thread that compiles kernels, in order of urgency."""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from adaptive.base.ambient import current_settings
from adaptive.runtime.memory import return_freed_memory

if TYPE_CHECKING:
    from .compiled import CompiledKernels

Item = tuple[int, int | tuple[int, ...]]  # (local index of a worker, size; or microbatches of a whole step)

QUIET_STEPS = 3  # undisturbed steps before each compile, from which policies can learn speeds
_TRIM_AFTER = (10.0, 60.0, 600.0)  # seconds after which freed memory is returned to the system
_FIRST_PAUSE = 1.0  # maximum seconds of the first pause; later ones last at most as long as the compile before


class BackgroundCompiler:
    """Compiles in one thread, so that the steps lose at most one core.

    Holds its owner weakly and ends with it. `close` does not wait for the thread. The end of the process waits for the
    current compile: a thread that returns from XLA to an interpreter that is shutting down would abort the process.

    If a compile takes a large part of the process's cores, steps beside it do not measure the machine's speed. With
    `pauses` the thread lets a few undisturbed steps pass before each compile. A pause is at most as long as the compile
    before it, so all compiles take at most twice as long. There is no pause after a compile during which no step ended,
    as in reserve.

    Args:
      owner: compiles an item.
      pauses: whether to let steps pass between two compiles.
    """

    def __init__(self, owner: CompiledKernels, *, pauses: bool = False):
        self.error: BaseException | None = None
        self._pauses, self._longest_pause = pauses, _FIRST_PAUSE
        self._beside_step = False  # whether the thread has compiled since the last step ended
        self._stepped = True  # whether a step has ended since the last compile began
        self._pausing = self._in_a_hurry = False
        # Ends a pause: for each step, whether the thread compiled during it. Needs no lock, like `_bell`.
        self._steps: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._waiting: dict[Item, tuple[int, int]] = {}  # items with their order
        self._at: Item | None = None
        self._lock = threading.Lock()
        # Needs no lock, because the garbage collector may call `_end` anywhere.
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._count = itertools.count()
        self._settings = current_settings()
        self._owner = weakref.ref(owner, self._end)
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all submitted items are compiled."""
        with self._lock:
            return self._at is None and not self._waiting

    def most_waiting(self) -> int:
        """Return the number of sizes that wait to be compiled, for the worker with most of them."""
        with self._lock:
            items = [*self._waiting, *([] if self._at is None else [self._at])]
        locals_ = [local for local, _ in items]
        return max((locals_.count(local) for local in set(locals_)), default=0)

    def put(self, local: int, size: int | tuple[int, ...], *, urgent: bool = False) -> None:
        """Add an item. Urgent ones are compiled first."""
        if self._ended:
            return
        with self._lock:
            order = (0 if urgent else 1, next(self._count))
            self._waiting[local, size] = min(order, self._waiting.get((local, size), order))
        self._bell.put(True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adaptive-compiler", daemon=True)
            atexit.register(self._end_and_wait)
            self._thread.start()

    def drop(self, local: int, size: int) -> None:
        """Remove an item, unless its compile has begun."""
        with self._lock:
            self._waiting.pop((local, size), None)

    def step_ended(self) -> bool:
        """Record the end of a step. Returns whether something was compiled during it."""
        with self._lock:
            beside, self._beside_step = self._beside_step, self._at is not None
            self._stepped = True
        if self._pausing:
            self._steps.put(beside)
        return beside

    @contextmanager
    def without_pauses(self) -> Iterator[None]:
        """Compile without pauses within the block, in which no step runs."""
        self._in_a_hurry = True
        self._steps.put(True)
        try:
            yield
        finally:
            self._in_a_hurry = False
            with self._lock:
                self._beside_step = self._at is not None

    def close(self) -> None:
        """End the thread after its current compile."""
        with self._lock:
            self._waiting.clear()
        self._end()

    def _end(self, _owner: object = None) -> None:
        self._ended = True
        self._bell.put(False)
        self._steps.put(True)

    def _end_and_wait(self) -> None:
        self.close()
        assert self._thread is not None, "registered with the thread"
        self._thread.join()

    def _next(self) -> Item | None:
        with self._lock:
            self._at = min(self._waiting, key=self._waiting.__getitem__, default=None)
            if self._at is not None:
                del self._waiting[self._at]
                self._beside_step, self._stepped = True, False
            return self._at

    def _pause(self) -> None:
        """Let some steps pass without a compiler beside them."""
        self._pausing, quiet, end = True, 0, time.monotonic() + self._longest_pause
        try:
            while quiet < QUIET_STEPS and not (self._in_a_hurry or self._ended):
                beside = self._steps.get(timeout=max(0.0, end - time.monotonic()))
                quiet = 0 if beside else quiet + 1
        except queue.Empty:
            pass
        finally:
            self._pausing = False

    def _wait_for_work(self) -> bool:
        """Wait for an item, and return freed memory to the system meanwhile. Returns False at the end."""
        for seconds in _TRIM_AFTER:
            try:
                return self._bell.get(timeout=seconds)
            except queue.Empty:
                return_freed_memory()
        return self._bell.get()

    def _run(self) -> None:
        try:
            self._compile_items()
        finally:
            atexit.unregister(self._end_and_wait)

    def _compile_items(self) -> None:
        while self._wait_for_work() and not self._ended:
            if self._pauses and self._stepped:
                self._pause()
            item, owner = self._next(), self._owner()
            if item is None or owner is None:
                continue
            began = time.monotonic()
            try:
                with self._settings():
                    owner.compile(*item)
            except BaseException as error:  # raised in the next step
                self.error = error
                return
            finally:
                del owner
            self._longest_pause, self._at = time.monotonic() - began, None
