"""Threads that read examples of one source concurrently, if reading waits for a disk or a network.

Waiting is measured: one thread starts, and its processor time is compared with the wall time. Each thread has a copy of
the source (`isolated_copies`). Before several threads stay in use, their examples are compared with those of one
thread, bit by bit, and their duration with that of one thread.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from adaptive.base.ambient import AmbientContext

from .fetch_thread import FetchThread
from .isolated_copies import CannotCopyError, SourceCopies

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

MOST_THREADS = 16  # as grain has
_EXAMPLES = 8  # least number of examples to measure before several threads are tried
_WAITED = 0.5  # least share of a read's time spent waiting for which several threads are tried
_SECONDS = 100e-6  # least waiting time per example for which several threads are tried
_TRIALS = 3
_FASTER = 0.7  # several threads may take at most this share of one thread's time

Functions = tuple[Callable[..., Any] | None, ...]
Own = tuple[Any, Functions]  # one thread's copies of the source and the functions
Read = Callable[[Own, int], Any]  # reads the example at an index within the request


class ReaderThreads:
    """A reader of examples that uses one thread, or several if they are faster.

    Args:
      source: the source; has a length.
      functions: the functions that are applied to each example, or `None`.

    Attributes:
      note: the reason why one thread reads although reading waits, or "".
    """

    def __init__(self, source: Any, functions: Functions):
        self._own: Own = (source, functions)
        self._others: list[tuple[FetchThread, Own]] = []
        self._several = False
        self._examples, self._wall, self._waited, self._waits = 0, 0.0, 0.0, 0
        self._decided, self.note, self._tried, self._seconds_of_several = False, "", 0, 0.0
        self._copies: SourceCopies | None = None
        try:
            self._copies = SourceCopies(source, functions)
        except CannotCopyError as error:
            self._why = str(error)

    def read(self, read: Read, count: int) -> list[Any]:
        """Return the results of `read` for the indices below `count`, in order.

        Raises:
          Exception: the error of `read` for the first index for which it fails.
        """
        if self._several and count > 1:
            return self._by_several(read, count)
        if self._decided:
            return [read(self._own, place) for place in range(count)]
        watch = _Stopwatch()
        found = [read(self._own, place) for place in range(count)]
        seconds = self._measured(watch, count)
        if self._examples >= _EXAMPLES and count > 1:
            self._decide(read, found, seconds)
        return found

    def close(self) -> None:
        """End the threads; they start again on demand."""
        others, self._others = self._others, []
        for thread, _ in others:
            thread.close()

    def _measured(self, watch: _Stopwatch, count: int) -> float:
        wall, processor, waits = watch.read()
        self._examples += count
        self._wall += wall
        self._waited += wall - processor
        self._waits += waits
        return wall

    def _decide(self, read: Read, found: list[Any], seconds: float) -> None:
        """Decide whether several threads read from now on, unless the measurements do not suffice yet.

        Args:
          read: reads one example.
          found: the examples that one thread has read.
          seconds: the time that one thread took.
        """
        waits = self._waited >= max(_WAITED * self._wall, _SECONDS * self._examples)
        self._decided = not waits or 2 * self._waits < self._examples  # few waits: other processes used the processor
        if self._decided:
            return
        self._tried += 1
        why = (self._why if self._copies is None else self._copies.shared()) or self._try(read, found)
        slow = not why and self._seconds_of_several > _FASTER * seconds
        if slow and self._tried < _TRIALS:  # try again: the first reads of copies open files
            self._several, self._examples, self._wall, self._waited, self._waits = False, 0, 0.0, 0.0, 0
            return
        self._decided = True
        if slow or why:
            self._several, self._copies = False, None
            self.close()
        if why:
            self.note = (
                f"examples are read one at a time, though reading waits: {why}. To read several at once, write "
                "num_readers= in ad.data.from_source, or have the source open what it reads in each __getitem__."
            )

    def _try(self, read: Read, found: list[Any]) -> str:
        """Read the same examples by several threads. Return the reason why that fails, or ""."""
        self._several = True
        try:
            self._threads(min(MOST_THREADS, len(found)) - 1)
            began = time.perf_counter()
            again = self._by_several(read, len(found))
        except Exception as error:  # caused by the copies: one thread has read the same examples
            return f"a copy of the source cannot read ({type(error).__name__}: {error})"
        self._seconds_of_several = time.perf_counter() - began
        return "" if all(map(same, found, again)) else "several threads, each with a copy, have read other examples"

    def _by_several(self, read: Read, count: int) -> list[Any]:
        places, found, failed = itertools.count(), [None] * count, _FirstError(count)

        def work(own: Own) -> None:
            while (place := next(places)) < failed.place:  # all examples before the first failure are read
                try:
                    found[place] = read(own, place)
                except BaseException as error:
                    failed.add(place, error)

        ambient = AmbientContext()
        others = self._threads(min(MOST_THREADS, count) - 1)
        running = [thread.submit(ambient.run, work, own) for thread, own in others]
        work(self._own)
        for future in running:
            future.result()
        if failed.error is not None:
            raise failed.error
        return found

    def _threads(self, count: int) -> Sequence[tuple[FetchThread, Own]]:
        assert self._copies is not None
        while len(self._others) < count:
            name = f"adaptive-input-{len(self._others) + 1}"
            self._others.append((FetchThread(name), self._copies.make()))
        return self._others[:count]


class _FirstError:
    """The error of the lowest index for which reading fails, independent of the threads' timing."""

    def __init__(self, count: int):
        self.place = count
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def add(self, place: int, error: BaseException) -> None:
        """Keep the error, unless an error of a lower index is kept."""
        with self._lock:
            if place < self.place:
                self.place, self.error = place, error


class _Stopwatch:
    """Time and waits of the current thread since this object was created."""

    def __init__(self) -> None:
        self._since = self._now()

    def read(self) -> tuple[float, float, int]:
        """Return wall seconds, processor seconds, and the number of voluntary context switches (waits)."""
        wall, processor, waits = (now - then for now, then in zip(self._now(), self._since, strict=True))
        return wall, processor, int(waits)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        who = getattr(resource, "RUSAGE_THREAD", None)  # Linux
        waits = resource.getrusage(who).ru_nvcsw if who is not None else time.perf_counter() * 1e9
        return time.perf_counter(), time.thread_time(), waits


def same(one: Any, other: Any) -> bool:
    """Return whether two examples on the host are equal, bit by bit."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in leaves)
