"""One thread that compiles behind the steps what is wanted, in order of urgency."""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from typing import Protocol

from adaptive.base.surroundings import settings_here

from . import ending as _ending

Item = tuple[int, int]  # a worker of this process, and a size


class Compiles(Protocol):
    """What a `BackgroundCompiler` works for."""

    def compile(self, local: int, size: int) -> None:
        """Compile what worker `local` needs for calls of `size`."""


class BackgroundCompiler:
    """One thread, so that the steps lose one core at most.

    Holds its owner weakly and ends with it. Nobody waits for it: not who closes it, nor, where that can be done safely
    (see `ending`), the end of the process.

    """

    def __init__(self, owner: Compiles):
        self.error: BaseException | None = None
        self._waiting: dict[Item, tuple[int, int]] = {}  # and how they are ordered
        self._at: Item | None = None
        self._lock = threading.Lock()
        # To ring it needs no lock, so that it can be done from wherever the owner happens to be collected.
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._count = itertools.count()
        self._settings = settings_here()
        self._owner = weakref.ref(owner, self._end)
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether all that was put in is compiled."""
        with self._lock:
            return self._at is None and not self._waiting

    def most_waiting(self) -> int:
        """How many sizes are not compiled yet that were put in, of the worker that waits for most."""
        with self._lock:
            items = [*self._waiting, *([] if self._at is None else [self._at])]
        locals_ = [local for local, _ in items]
        return max((locals_.count(local) for local in set(locals_)), default=0)

    def put(self, local: int, size: int, *, urgent: bool = False) -> None:
        """Compile this, too: before what is not urgent, if it is."""
        if self._ended:
            return
        with self._lock:
            order = (0 if urgent else 1, next(self._count))
            self._waiting[local, size] = min(order, self._waiting.get((local, size), order))
        self._bell.put(True)
        if self._thread is None:
            self._thread = _ending.start(self._run, self.close, "adaptive-compiler")

    def drop(self, local: int, size: int) -> None:
        """Do not compile this, if it has not begun."""
        with self._lock:
            self._waiting.pop((local, size), None)

    def close(self) -> None:
        """End behind what is being compiled."""
        with self._lock:
            self._waiting.clear()
        self._end()

    def _end(self, _owner: object = None) -> None:
        self._ended = True
        self._bell.put(False)

    def _next(self) -> Item | None:
        with self._lock:
            self._at = min(self._waiting, key=self._waiting.__getitem__, default=None)
            if self._at is not None:
                del self._waiting[self._at]
            return self._at

    def _run(self) -> None:
        while self._bell.get() and not self._ended:
            item, owner = self._next(), self._owner()
            if item is None or owner is None:
                continue
            try:
                with self._settings():
                    owner.compile(*item)
            except BaseException as error:  # raised in the step that follows
                self.error = error
                return
            finally:
                del owner
            self._at = None
