"""Background threads that may be inside XLA when the process ends, where they cannot be interrupted for up to a minute.

Without care the process could crash in two ways. If a thread returns from XLA while the interpreter is finalized,
Python (before 3.14) ends it by `pthread_exit`, which unwinds C++ frames and aborts the process: "terminate called after
throwing". Later, `exit` runs the destructors of C++ while the compiler still uses the objects.

So each such thread registers a cleanup handler of glibc, which `pthread_exit` calls before it unwinds any frame. The
handler waits forever, for a mutex that the thread itself holds. The process ends by `_exit`, with its exit status,
after Python and MPI are finalized. Without glibc, the process waits for the thread.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NEEDED = ("on_exit", "__cxa_atexit", "fflush", "_exit", "calloc", "pthread_mutex_lock", "_pthread_cleanup_push")

_stops: dict[threading.Thread, Callable[[], None]] = {}
_inside: set[threading.Thread] = set()
_ending = threading.Event()


def start(work: Callable[[], None], stop: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread. The process can end while the thread is in an `uninterruptible` block.

    Args:
      work: what the thread does.
      stop: asks the thread to end; called when the process ends.
    """

    def run() -> None:
        try:
            _prepare()
            work()
        finally:
            _stops.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _stops[thread] = stop
    thread.start()
    return thread


@contextmanager
def uninterruptible() -> Iterator[None]:
    """Mark a block that may take long and cannot be interrupted. No thread enters one after the process begins to end.

    Raises:
      SystemExit: in a thread that would enter the block later.
    """
    thread = threading.current_thread()
    if _ending.is_set() and thread in _stops:
        raise SystemExit
    _inside.add(thread)
    try:
        yield
    finally:
        _inside.discard(thread)


def _glibc() -> Any:
    """Return the C library if it has the required functions, else None."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in _NEEDED):
        return None
    library.calloc.restype = ctypes.c_void_p
    return library


def _prepare() -> None:
    """Make `pthread_exit` in this thread wait forever. The memory allocated here must outlive Python."""
    if (c := _glibc()) is not None:
        mutex, entry = (ctypes.c_void_p(c.calloc(1, 64)) for _ in range(2))  # 40 and 32 bytes are used
        c.pthread_mutex_lock(mutex)
        c._pthread_cleanup_push(entry, c.pthread_mutex_lock, mutex)


@atexit.register
def _end() -> None:
    _ending.set()
    threads = dict(_stops)
    for stop in threads.values():
        stop()
    for thread in threads:
        while thread.is_alive() and thread not in _inside:  # the thread runs Python code, such as tracing a driver
            time.sleep(0.002)
    left = [thread for thread in threads if thread.is_alive()]
    if left and (c := _glibc()) is not None:
        c.on_exit(c._exit, None)  # the last to be called: handlers are called in reverse order
        c.__cxa_atexit(c.fflush, None, None)  # of all streams of C; Python's are flushed by then
    else:
        for thread in left:
            thread.join()
