"""Reads that hang: warnings that name the example, its reader and the reader's stack, and a deadline for each read.

Reads run in another thread than the steps, or in another process. A read records the example and the time of its start
(`CurrentReads`). A thread that waits for examples for some time looks at these records (`ReadWatch`), logs warnings,
and raises an error when one read takes longer than the deadline; the reader is abandoned. So reads are watched only
while a thread waits for them, and a reader that hangs cannot prevent the error.

The deadline limits the seconds that this process waits for one read. The default is 1.5 times the world's
`hang_timeout`: the other processes have waited for about the same time, report this process after `hang_timeout`, and
end it after twice that, so the error comes first. A single process has no deadline by default. Without a deadline
(`read_timeout=0`), a rank that hangs is lost, and the others read its examples; the next wait then has a deadline.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from math import isfinite
from mmap import mmap
from typing import Any, Protocol, TypeVar

from adaptive.base.ambient import AmbientContext
from adaptive.base.current import current_world
from adaptive.base.errors import DataError
from adaptive.base.numbers import brief, real
from adaptive.base.python_stacks import stack_of_thread
from adaptive.base.waits import waiting
from adaptive.base.world import World
from adaptive.base.world_members import Loss

from .fetch_thread import FetchThread

T = TypeVar("T")

_FIRST_WARNING = 30.0  # seconds; at most a quarter of the world's hang_timeout, and half of the deadline
_OF_HANG_TIMEOUT = 1.5  # the default deadline, in units of hang_timeout
_LONGEST_TICK = 1.0  # longest time between two looks at the readers, in seconds
_TO_START = 60.0  # least deadline for the start of a reader process, which imports JAX and the data's libraries
_SHOWN = 4  # largest number of reads in one message

_HERE = os.path.join(os.path.dirname(__file__), "")

_log = logging.getLogger("adaptive")


def checked_timeout(read_timeout: float | None) -> float | None:
    """Return `read_timeout=` as a number; `None` for the default.

    Raises:
      DataError: it is not a number of seconds.
    """
    seconds = None if read_timeout is None else real(read_timeout)
    if read_timeout is not None and (seconds is None or not isfinite(seconds) or seconds < 0):
        raise DataError(
            f"read_timeout={brief(read_timeout)}: write the seconds after which reading one example fails, or 0 for no "
            f"limit. By default it is {_OF_HANG_TIMEOUT:g} times the world's hang_timeout."
        )
    return seconds


# --- reads in progress ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CurrentRead:
    """A read in progress.

    Attributes:
      what: a description of the read, such as "example 12 of the data".
      reader: the thread or process, such as "thread adaptive-input" or "reader process 4711, stopped".
      since: the start of the read, by `time.monotonic`; 0.0 if unknown.
      stack: returns the reader's stack, or "".
      starts: whether `what` is the start of a process, which takes seconds although nothing is read.
    """

    what: str
    reader: str
    since: float
    stack: Callable[[], str]
    starts: bool = False

    def __str__(self) -> str:
        seconds = [f"for {time.monotonic() - self.since:.0f} s"] if self.since else []
        return f"{self.what} (by {', '.join([self.reader, *seconds])})"


class CurrentReads:
    """The current read of each thread of this process, for one data set.

    Args:
      of: the data set in messages, such as "of the data".
    """

    def __init__(self, of: str = "of the data"):
        self._of = of
        self._by_thread: dict[int, tuple[int | str, int, float]] = {}
        self._file: mmap | None = None

    def begin(self, what: int | str, count: int = 1) -> None:
        """Record the start of a read by this thread, in place of its previous read.

        Args:
          what: the index of the example, or a description.
          count: number of examples that one call reads, of which `what` is the first.
        """
        self._by_thread[threading.get_ident()] = (what, count, time.monotonic())
        if self._file is not None:
            self._write()

    def end(self) -> None:
        """Record the end of this thread's read."""
        self._by_thread.pop(threading.get_ident(), None)
        if self._file is not None:
            self._write()

    def now(self) -> list[CurrentRead]:
        """Return the reads in progress, the oldest first. Thread-safe."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        reads = sorted(self._by_thread.copy().items(), key=lambda item: item[1][2])
        return [
            CurrentRead(
                words_of(what, count, self._of),
                f"thread {names[ident]}",
                since,
                partial(stack_of_thread, ident, _HERE),
            )
            for ident, (what, count, since) in reads
            if ident in names
        ]

    def write_to(self, file: mmap) -> None:
        """Write the oldest read to this file too, from now on; another process parses it by `read_status`."""
        self._file = file
        self._write()

    def _write(self) -> None:
        reads = self._by_thread
        oldest = min(reads.values(), key=lambda read: read[2]) if reads else ("", 0, 0.0)
        what, count, since = oldest
        _STATUS.pack_into(self._file, 0, what if isinstance(what, int) else -1, count, since)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:  # another process has other threads
        return CurrentReads, (self._of,)


_STATUS = struct.Struct("<qqd")
STATUS_BYTES = _STATUS.size


def read_status(status: bytes) -> tuple[int, int, float]:
    """Parse another process's status: the index of the first example, the number of examples, the start of the read."""
    return _STATUS.unpack(status)


def words_of(what: int | str, count: int, of: str) -> str:
    """Describe a read: "example 12 of the data"."""
    if isinstance(what, str):
        return f"{what} {of}"
    return f"example {what} {of}" if count == 1 else f"example {what} and {count - 1} more {of} in one call"


class Readable(Protocol):
    """Data that user code reads."""

    @property
    def read_timeout(self) -> float | None:
        """Seconds after which reading one example fails; `None` for the default, 0 for no limit."""
        ...

    @property
    def thread(self) -> FetchThread:
        """The one thread that reads the data or waits for reader processes, so that sources need no locks."""
        ...

    def current_reads(self) -> Sequence[CurrentRead]:
        """Return the reads in progress, by threads of this process or by reader processes."""
        ...

    def abandon(self) -> None:
        """End the reader processes, if there are any; they start again on demand."""
        ...


# --- waiting ----------------------------------------------------------------------------------------------------------


class ReadWatch:
    """A wait for examples that warns of slow reads, and ends at the deadline.

    Args:
      data: the data that are read.
      world: the world whose other processes wait meanwhile; `None` if there are none.
    """

    def __init__(self, data: Readable, world: World | None):
        self._data, self._world = data, world
        self._losses: Sequence[Loss] = ()  # at the last successful read

    def result(self, future: Future[T]) -> T:
        """Wait for a task of the data's thread; return its result, or raise its error.

        Raises:
          DataError: a read takes longer than the deadline.
        """
        if not future.done():
            self._wait_until(future)
        result = future.result()
        if self._world is not None:
            self._losses = self._world.losses
        return result

    def _wait_until(self, future: Future[Any]) -> None:
        deadline, first = self._seconds()
        tick = min(_LONGEST_TICK, first / 4)
        if not _comes(future, tick):
            with waiting(self):
                self._wait(future, deadline, first, tick)

    def _wait(self, future: Future[Any], deadline: float, first: float, tick: float) -> None:
        waited: dict[tuple[str, float], float] = {}  # for each read
        last, warn_at = time.monotonic() - tick, first
        while True:
            reads = self._reads()
            now = time.monotonic()
            passed, last = min(now - last, 2 * tick), now  # a longer time means that this process itself was stopped
            waited = {key: waited.get(key, 0.0) + passed for key in map(_key, reads)}
            longest = max(waited.values())
            late = [read for read in reads if waited[_key(read)] >= 0.75 * longest]
            late = [read for read in late if not read.starts] or late
            over = max(deadline, _TO_START) if late[0].starts else deadline
            if deadline and longest >= over:
                error = DataError(self._given_up(late, longest))
                self._data.abandon()
                raise error
            if longest < first:
                warn_at = first  # another read, or the first one
            elif longest >= warn_at:
                _log.warning(self._warning(late, longest, deadline))
                warn_at = 2 * longest
            if _comes(future, tick):
                return

    def _seconds(self) -> tuple[float, float]:
        """Return (deadline, first warning), in seconds since the wait began; a deadline of 0 means none."""
        world, deadline = self._world, self._data.read_timeout
        hang_timeout = world.hang_timeout if world is not None and world.processes > 1 else 0.0
        if deadline is None or (deadline == 0 and self._lost()):
            deadline = _OF_HANG_TIMEOUT * hang_timeout  # the read in which a lost rank hung ends the job the next time
        limits = [_FIRST_WARNING, *([hang_timeout / 4] if hang_timeout else []), *([deadline / 2] if deadline else [])]
        return deadline, min(limits)

    def _lost(self) -> Sequence[Loss]:
        """Return the losses since the last successful read: the other ranks now read these ranks' examples."""
        return self._world.losses[len(self._losses) :] if self._world is not None else ()

    def _reads(self) -> Sequence[CurrentRead]:
        """Return the reads that are waited for; at least one."""
        thread = self._data.thread
        own = CurrentRead("examples", f"thread {thread.name}", 0.0, partial(stack_of_thread, thread.ident))
        return self._data.current_reads() or [own]

    # --- messages -----------------------------------------------------------------------------------------------------

    def words(self) -> str:
        """Describe the reads that are waited for; see `adaptive.base.waits`."""
        return "waiting for " + "; ".join(map(str, self._reads()[:_SHOWN]))

    def stack(self) -> str:
        """Return the readers' stacks."""
        return _stacks(self._reads())

    def _warning(self, late: Sequence[CurrentRead], waited: float, deadline: float) -> str:
        ends = (
            f"The wait ends with a DataError after {deadline:g} s (read_timeout=)."
            if deadline
            else "No deadline ends this: read_timeout= of ad.data.from_source and from_iterator sets one."
        )
        return f"{self._who()} has waited {waited:.0f} s for {_list(late)}.\n{_stacks(late)}\n{ends}"

    def _given_up(self, late: Sequence[CurrentRead], waited: float) -> str:
        given = self._data.read_timeout is not None
        by_default = (
            "" if given else f", which is {_OF_HANG_TIMEOUT:g} times the hang_timeout= of comm.world() by default"
        )
        more = "" if given else " and a larger hang_timeout= with it, or the other ranks end this one,"
        lost = "".join(f"Before, {loss} Its examples are read by the others.\n" for loss in self._lost())
        return (
            f"{self._who()} has waited {waited:.0f} s, the deadline of a read, for {_list(late)}.\n{_stacks(late)}\n"
            f"{lost}The deadline is read_timeout= of ad.data.from_source and from_iterator, in seconds{by_default}. "
            f"If a read may take longer, write more{more} or 0 for no deadline."
        )

    def _who(self) -> str:
        who = f"pid {os.getpid()} on {socket.gethostname()}"
        world = self._world
        return f"rank {world.rank} ({who})" if world is not None and world.processes > 1 else f"This process ({who})"


def _comes(future: Future[Any], seconds: float) -> bool:
    """Return whether a future is done within some seconds."""
    try:
        future.exception(seconds)
    except TimeoutError:
        return future.done()
    return True


def _key(read: CurrentRead) -> tuple[str, float]:
    return read.what, read.since  # without the reader, whose description changes when it is stopped and continued


def _list(reads: Sequence[CurrentRead]) -> str:
    more = f"; and {len(reads) - _SHOWN} more" if len(reads) > _SHOWN else ""
    return "; ".join(map(str, reads[:_SHOWN])) + more


def _stacks(reads: Sequence[CurrentRead]) -> str:
    stacks = dict.fromkeys(read.stack() for read in reads[:_SHOWN])
    return "\n".join(f"    {line}" for stack in stacks for line in stack.splitlines()) or "    (no stack can be had)"


def read_in_background(data: Readable, function: Callable[[], T]) -> T:
    """Call a function that reads in the data's thread, with the warnings and the deadline of a step's reads.

    Raises:
      DataError: a read takes longer than the deadline.
    """
    return ReadWatch(data, current_world.get()).result(data.thread.submit(AmbientContext().run, function))
