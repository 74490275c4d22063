"""A background thread for user code, which may hang, fork, or still run when the interpreter exits.

`ThreadPoolExecutor` does not fit. The interpreter joins its threads before it exits, so a read that hangs would keep
the process alive forever. Its exit hook also runs in a process that is forked inside one of its threads, as PyTorch's
loaders fork their workers: there the thread would join itself, which raises.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]

# A daemon thread that is in C++ code when the interpreter exits can abort the process. So the exit waits for a running
# task, but only briefly, so that a task that hangs does not keep the process alive.
_SECONDS_AT_EXIT = 1.0


class FetchThread:
    """A daemon thread that runs tasks one after another, started by the first task.

    The thread ends after `close`, and when this object is garbage collected. Neither waits for the running task.

    Args:
      name: name of the thread.
    """

    def __init__(self, name: str):
        self.name = name
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def ident(self) -> int | None:
        """The thread's identifier, as in `sys._current_frames()`; `None` before the first task."""
        return self._thread.ident if self._thread is not None else None

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Run `function(*args)` after all tasks submitted before. A task that has not started can be canceled.

        Raises:
          RuntimeError: the thread is closed.
        """
        if self._closed:
            raise RuntimeError("the thread that fetches examples is closed")
        if self._thread is None:
            self._start()
        future: Future[T] = Future()
        self._tasks.put((future, function, args))
        return future

    def __reduce__(self) -> tuple[Any, ...]:  # a copy, or the object in another process, has its own thread
        return FetchThread, (self.name,)

    def close(self) -> None:
        """End the thread after the tasks submitted so far, without waiting for them."""
        if not self._closed:
            self._closed = True
            self._tasks.put(None)

    def _start(self) -> None:
        self._thread = threading.Thread(target=_run, args=(self._tasks,), name=self.name, daemon=True)
        self._thread.start()
        at_exit = _AtExit(self._thread, self._tasks)
        atexit.register(at_exit)
        weakref.finalize(self, at_exit.end_thread).atexit = False


@lru_cache(maxsize=1)
def _end_of_waiting() -> float:
    """Return the time until which the exit waits for all threads together. First called when the interpreter exits."""
    return time.monotonic() + _SECONDS_AT_EXIT


class _AtExit:
    """An exit hook that ends a thread: cancels its queued tasks, and waits briefly for the running one."""

    def __init__(self, thread: threading.Thread, tasks: SimpleQueue[Task | None]):
        self._thread, self._tasks, self._pid = thread, tasks, os.getpid()

    def __call__(self) -> None:
        if os.getpid() != self._pid:  # this is a forked process, which does not have the thread
            return
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task[0].cancel()
        self._tasks.put(None)
        self._thread.join(max(0.0, _end_of_waiting() - time.monotonic()))

    def end_thread(self) -> None:
        """End the thread after its tasks, and unregister the exit hook."""
        atexit.unregister(self)
        self._tasks.put(None)


def _run(tasks: SimpleQueue[Task | None]) -> None:
    """Run tasks until a `None` arrives. Keeps no reference to a task while it waits for the next one."""
    while True:
        task = tasks.get()
        if task is None:
            return
        _run_task(*task)
        del task


def _run_task(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args)
    except BaseException as error:
        future.set_exception(error)
        del future  # breaks a cycle: the error's traceback holds this frame, and the future holds the error
    else:
        future.set_result(result)
