"""Background threads that may be inside XLA, which cannot be interrupted for up to a minute, when the process ends.

Two things would go wrong. A thread that comes back from XLA while the interpreter is finalized is ended by Python
(before 3.14) with `pthread_exit`, which unwinds the C++ frames above it, and these abort the process: "terminate called
after throwing". And behind the interpreter `exit` runs the destructors of C++, under the feet of the compiler.

So such a thread is prepared, with what glibc keeps for C compilers that know no exceptions: a cleanup handler, called
by `pthread_exit` before any frame is unwound. It waits for a mutex that it has itself, which is for ever, or until the
process is gone. The process ends by `_exit`, with the status that it has by then, once everything in
Python (and MPI, which is finalized with it) has come to its end. Where there is no glibc, such a thread is waited for.
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
    """Start a thread. The end of the process does not wait for it while it is in an `uninterruptible` block.

    Args:
      work: what the thread does.
      stop: tells it to end soon; called when the process ends.
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
    """Mark a block that may take long and cannot be interrupted. No other thread enters one once the process ends.

    Raises:
      SystemExit: in a thread that comes here too late.
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
    """Return the C library, if it has the functions that are needed."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in _NEEDED):
        return None
    library.calloc.restype = ctypes.c_void_p
    return library


def _prepare() -> None:
    """Let `pthread_exit` in this thread wait for ever. What is allocated here must outlive Python."""
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
        while thread.is_alive() and thread not in _inside:  # in Python: tracing a driver, say
            time.sleep(0.002)
    left = [thread for thread in threads if thread.is_alive()]
    if left and (c := _glibc()) is not None:
        c.on_exit(c._exit, None)  # the last to be called: handlers are called in reverse order
        c.__cxa_atexit(c.fflush, None, None)  # of all streams of C; Python's are flushed by then
    else:
        for thread in left:
            thread.join()
