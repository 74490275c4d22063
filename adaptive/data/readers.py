"""Threads and processes that read examples, and waits for them that end with an error at a deadline.

Threads of `concurrent.futures` are joined at exit, so a read that hangs would keep the process alive. A daemon thread
that is in C++ code when the interpreter exits can abort the process. So the exit waits for running reads, but briefly.

Reader processes are loky's, started by fork and exec, so that neither JAX's threads nor MPI are copied, and without
running the user's script again. Each receives the source once, by cloudpickle.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, wait
from math import isfinite
from queue import SimpleQueue
from typing import Any

import jax

from adaptive.base.errors import DataError
from adaptive.base.process.python_stacks import stack_of_thread
from adaptive.base.process.waits import waiting
from adaptive.base.values.ambient import AmbientContext
from adaptive.base.values.current import current_world
from adaptive.base.values.numbers import real
from adaptive.base.world import World

Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]

_SECONDS_AT_EXIT = 1.0
# The default deadline, in units of hang_timeout. The other processes have waited for about the same time. They report
# this process after one hang_timeout and end it after two, so the error comes first.
_OF_HANG_TIMEOUT = 1.5
_LONGEST_TICK = 1.0  # longest time between two looks at the current read, in seconds
_TO_START = 60.0  # seconds by which the first deadline of processes is later: they import JAX and the data's libraries
_HERE = os.path.join(os.path.dirname(__file__), "")
# Reader processes do not use devices, and libraries' threads would oversubscribe the cores.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Readers:
    """Threads or processes that read examples; an abstract class. Raises a DataError for a wrong `read_timeout`."""

    world: World | None = None  # whose other processes wait while this one does; `None` for the current one

    def __init__(self, number: int, read_timeout: float | None):
        seconds = None if read_timeout is None else real(read_timeout)
        if read_timeout is not None and (seconds is None or not isfinite(seconds) or seconds < 0):
            raise DataError(
                f"read_timeout={read_timeout!r}: write the seconds after which reading one example fails, or 0 "
                f"for no limit. By default it is {_OF_HANG_TIMEOUT:g} times the world's hang_timeout."
            )
        self.number, self._limit, self._extra = number, seconds, 0.0
        self._waits_for = "", 0.0  # what, and since when

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start to read: call a function, the same one in all processes. Raises a DataError if it cannot be sent."""
        raise NotImplementedError

    def result(self, read: Future[Any], what: str = "examples") -> Any:
        """Return the result of a read. Raises its error, or a DataError at the deadline, which says `what` is read."""
        if not read.done():
            self._waits_for = what, time.monotonic()
            begin_read(what)
            with waiting(self):
                self._wait(read, self.world or current_world.get())
        return read.result()

    def _wait(self, read: Future[Any], world: World | None) -> None:
        others = world if world is not None and world.processes > 1 else None
        limit = self._limit
        if limit is None:
            limit = _OF_HANG_TIMEOUT * others.hang_timeout if others else 0.0
        tick, current, waited = min(_LONGEST_TICK, limit / 4), None, 0.0
        while not wait([read], tick or None).done:  # counts ticks: the clock also runs while this process is stopped
            last, current = current, self._current()
            waited = waited + tick if current == last else 0.0
            if waited >= limit + self._extra:
                who = f"pid {os.getpid()} on {socket.gethostname()}"
                who = f"rank {others.rank} ({who})" if others else f"this process ({who})"
                default = "" if self._limit else f" ({_OF_HANG_TIMEOUT:g} times the world's hang_timeout)"
                error = DataError(
                    f"{who} has waited {waited:.0f} s, the limit of a read: {self.words()}.\n{self.stack()}\nThe limit "
                    f"is read_timeout= of ad.data.from_source and from_iterator, in seconds{default}; 0 is no limit."
                )
                self.close()
                raise error

    def _current(self) -> tuple[str, float]:
        """Return what is being read, and since when."""
        return self._waits_for

    def words(self) -> str:
        """Describe the read that is waited for; see `adaptive.base.process.waits`."""
        what, began = self._current()
        return f"waiting for {what} (by thread adaptive-input, for {time.monotonic() - began:.0f} s)"

    def stack(self) -> str:
        """Return the stack of the thread that reads, or ""."""
        return ""

    def close(self) -> None:
        """Kill processes, also while they read; they start again on demand. Does not wait."""


# --- threads ----------------------------------------------------------------------------------------------------------

_reads: dict[int, tuple[str, float]] = {}  # by thread: what it reads, and since when


def begin_read(what: str) -> None:
    """Record what this thread reads or waits for, such as "example 12 of the data"."""
    _reads[threading.get_ident()] = what, time.monotonic()


class ReaderThreads(Readers):
    """Daemon threads that read in the order of submission. The first read starts them; they end with this object."""

    def __init__(self, number: int = 1, read_timeout: float | None = None):
        super().__init__(number, read_timeout)
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ambient = AmbientContext()  # of the thread that creates this object: reads run in it

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if not self._threads:
            for _ in range(self.number):
                thread = threading.Thread(target=_run, args=(self._tasks,), name="adaptive-input", daemon=True)
                self._threads.append(thread)
                thread.start()
            weakref.finalize(self, _end, self._tasks, self.number).atexit = False
            _all.add(self)
        future: Future[Any] = Future()
        self._tasks.put((future, self._ambient.run, (function, *args)))
        return future

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a thread, and return its result. For errors see `result`."""
        return self.result(self.submit(function, *args))

    def _current(self) -> tuple[str, float]:
        return (self.number == 1 and _reads.get(self._threads[0].ident or 0)) or self._waits_for

    def stack(self) -> str:
        return stack_of_thread(self._threads[0].ident, _HERE) if self.number == 1 else ""

    def end_at_exit(self, until: float) -> None:
        """Drop the reads that have not begun, and wait for the running ones until this time."""
        while not self._tasks.empty():
            self._tasks.get()
        _end(self._tasks, self.number)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


_all: weakref.WeakSet[ReaderThreads] = weakref.WeakSet()
os.register_at_fork(after_in_child=_all.clear)  # a forked process does not have the threads


@atexit.register
def _end_all() -> None:
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
            _reads.pop(threading.get_ident(), None)
        del task, future, function, args


# --- processes --------------------------------------------------------------------------------------------------------


class ReaderProcesses(Readers):
    """Processes that receive a function once. They start on demand, also after one was lost."""

    _executor: Any = None

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        try:
            return (self._executor or self._start(function)).submit(_read, *args)
        except BrokenExecutor:  # a process was lost; earlier reads have raised the error
            return self._start(function).submit(_read, *args)

    def _start(self, function: Callable[..., Any]) -> Any:
        import cloudpickle
        import loky

        try:
            pickled = cloudpickle.dumps(function)
        except Exception as error:
            raise DataError(
                f"num_readers={self.number}: the data cannot be sent to other processes: {type(error).__name__}: "
                f"{error}\nLet them open files and connections when the first example is read, not before."
            ) from error
        self._executor = executor = loky.ProcessPoolExecutor(
            self.number,
            initializer=_begin,
            initargs=(pickled, os.getpid(), jax.config.jax_enable_x64),
            env={**{name: os.environ.get(name, one) for name, one in _ONE_THREAD.items()}, "JAX_PLATFORMS": "cpu"},
        )
        self._end, self._extra = weakref.finalize(self, executor.shutdown, wait=False, kill_workers=True), _TO_START
        return executor

    def result(self, read: Future[Any], what: str = "examples") -> Any:
        """Wait for a read. Raises a DataError as `Readers.result`, or if its process was lost."""
        try:
            found = super().result(read, f"{what} from a reader process")
        except RuntimeError as error:
            if type(error).__module__.partition(".")[0] != "loky":
                raise
            raise DataError(
                f"a process that reads examples was lost: {error}\nIf it was killed for memory, lower num_readers=, "
                "or pass data that each process opens itself instead of holding it in memory."
            ) from error
        self._extra = 0.0
        return found

    def close(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            self._end()


# --- in a reader process ----------------------------------------------------------------------------------------------

_here: list[Any] = []


def _begin(pickled: bytes, parent: int, wide: bool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # sent to the whole job: the parent decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    jax.config.update("jax_enable_x64", wide)
    try:
        _here.append(pickle.loads(pickled))
    except Exception as error:
        _here.append(_sendable(error))


def _leave_with(parent: int) -> None:
    """End this process when its parent has ended; nothing else ends it if the parent is killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _read(*args: Any) -> Any:
    (function,) = _here
    if isinstance(function, Exception):
        raise function
    try:
        return function(*args)
    except Exception as error:
        raise _sendable(error) from None


def _sendable(error: Exception) -> Exception:
    """Return an error that can be pickled, with a note on where it was raised."""
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = DataError(f"{type(error).__name__}: {error}")
    error.add_note(f"raised in a process that reads examples:\n{where}")
    return error
