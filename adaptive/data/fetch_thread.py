"""Daemon threads that read examples, and waits for them that end with an error at a deadline.

Threads of `concurrent.futures` are joined at exit, so a read that hangs would keep the process alive. A daemon thread
that is in C++ code when the interpreter exits can abort the process. So the exit waits for running tasks, but briefly.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from math import isfinite
from queue import SimpleQueue
from typing import Any, TypeVar

from adaptive.base.ambient import AmbientContext
from adaptive.base.current import current_world
from adaptive.base.errors import DataError
from adaptive.base.numbers import brief, real
from adaptive.base.python_stacks import stack_of_thread
from adaptive.base.waits import waiting
from adaptive.base.world import World

T = TypeVar("T")
Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]

_SECONDS_AT_EXIT = 1.0
# The default deadline, in units of hang_timeout. The other processes have waited for about the same time. They report
# this process after one hang_timeout and end it after two, so the error comes first.
_OF_HANG_TIMEOUT = 1.5
_LONGEST_TICK = 1.0  # longest time between two looks at the current read, in seconds
_HERE = os.path.join(os.path.dirname(__file__), "")


class DaemonThreads:
    """Daemon threads that run tasks in the order of their submission, started by the first task.

    The threads end when this object is garbage collected, without waiting for running tasks.

    Args:
      number: how many tasks run at the same time.
    """

    def __init__(self, number: int = 1):
        self._number = number
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ambient = AmbientContext()  # of the thread that creates this object: tasks run in it

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Run `function(*args)` in a thread. A task that has not started can be canceled."""
        if not self._threads:
            for _ in range(self._number):
                thread = threading.Thread(target=_run, args=(self._tasks,), name="adaptive-input", daemon=True)
                self._threads.append(thread)
                thread.start()
            weakref.finalize(self, _end, self._tasks, self._number).atexit = False
            _all.add(self)
        future: Future[T] = Future()
        self._tasks.put((future, self._ambient.run, (function, *args)))
        return future

    def end_at_exit(self, until: float) -> None:
        """Cancel the tasks that have not started, and wait for the running ones until this time."""
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task[0].cancel()
        _end(self._tasks, self._number)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


_all: weakref.WeakSet[DaemonThreads] = weakref.WeakSet()
_pid = os.getpid()


@atexit.register
def _end_all() -> None:
    if os.getpid() == _pid:  # a forked process does not have the threads
        until = time.monotonic() + _SECONDS_AT_EXIT
        for threads in list(_all):
            threads.end_at_exit(until)


def _end(tasks: SimpleQueue[Task | None], number: int) -> None:
    for _ in range(number):
        tasks.put(None)


def _run(tasks: SimpleQueue[Task | None]) -> None:
    """Run tasks until a `None` arrives. Keeps no reference to a task while it waits for the next one."""
    while (task := tasks.get()) is not None:
        future, function, args = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)
            _current.pop(threading.get_ident(), None)
        del task, future, function, args


# --- the deadline -----------------------------------------------------------------------------------------------------

_current: dict[int, tuple[float, str, float]] = {}  # by thread: when its read began, what it is, and extra seconds


def begin_read(what: str, extra: float = 0.0) -> None:
    """Record what this thread reads or waits for, such as "example 12 of the data"; `extra` delays the deadline."""
    _current[threading.get_ident()] = (time.monotonic(), what, extra)


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


class FetchThread(DaemonThreads):
    """The one thread that reads a data set, or waits for its readers, so that sources need no locks.

    Args:
      read_timeout: seconds after which a read fails; 0 for no limit; `None` for the default: 1.5 times the world's
        `hang_timeout`, and no limit on one process.
      abandon: called before the error of a read that takes too long.

    Attributes:
      world: the world whose other processes wait meanwhile; `None` for the current one.
    """

    def __init__(self, read_timeout: float | None = None, abandon: Callable[[], None] = lambda: None):
        super().__init__()
        self.read_timeout, self._abandon = checked_timeout(read_timeout), abandon
        self.world: World | None = None

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` in the thread, and return its result. For errors see `result`."""
        return self.result(self.submit(function, *args))

    def result(self, future: Future[T]) -> T:
        """Wait for the result of a task, or raise its error.

        Raises:
          DataError: a read takes longer than the deadline.
        """
        if not future.done():
            with waiting(self):
                self._wait(future)
        return future.result()

    def _wait(self, future: Future[Any]) -> None:
        world, limit = self.world or current_world.get(), self.read_timeout
        if limit is None:
            limit = _OF_HANG_TIMEOUT * world.hang_timeout if world is not None and world.processes > 1 else 0.0
        tick, read, waited = min(_LONGEST_TICK, limit / 4), None, 0.0
        while not wait([future], tick or None).done:  # counts ticks: the clock also runs while this process is stopped
            last, read = read, self._read()
            waited = waited + tick if read == last else 0.0
            if waited >= limit + read[2]:
                error = DataError(self._given_up(waited, world))
                self._abandon()
                raise error

    def _read(self) -> tuple[float, str, float]:
        return _current.get(self._threads[0].ident or 0, (0.0, "examples", 0.0))

    def words(self) -> str:
        """Describe the read that is waited for; see `adaptive.base.waits`."""
        began, what, _ = self._read()
        return (
            f"waiting for {what} (by thread adaptive-input, for {time.monotonic() - (began or time.monotonic()):.0f} s)"
        )

    def stack(self) -> str:
        """Return the stack of the thread that reads."""
        return stack_of_thread(self._threads[0].ident, _HERE)

    def _given_up(self, waited: float, world: World | None) -> str:
        who = f"pid {os.getpid()} on {socket.gethostname()}"
        who = f"rank {world.rank} ({who})" if world is not None and world.processes > 1 else f"this process ({who})"
        default = "" if self.read_timeout else f" ({_OF_HANG_TIMEOUT:g} times the world's hang_timeout)"
        return (
            f"{who} has waited {waited:.0f} s, the limit of a read: {self.words()}.\n{self.stack()}\n"
            f"The limit is read_timeout= of ad.data.from_source and from_iterator, in seconds{default}; 0 is no limit."
        )
