"""Reader processes, for sources whose `data[i]` computes.

They are processes of loky, started by fork and exec, so that neither JAX's threads nor MPI are copied, and without
running the user's script again, which needs no `if __name__ == "__main__"`. Each receives the source once, by
cloudpickle.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import traceback
import weakref
from concurrent.futures import BrokenExecutor, Future
from typing import Any

import jax

from adaptive.base.errors import DataError

from .fetch_thread import begin_read

# Reader processes do not use devices, and libraries' threads would oversubscribe the cores.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_TO_START = 60.0  # seconds by which the deadline of their start is later: they import JAX and the data's libraries


class ReaderProcesses:
    """Reader processes of one source, which start at the first read, and again after one was lost or after `close`.

    Args:
      reader: has a method `read`; sent to each process once.
      number: number of processes.
    """

    def __init__(self, reader: Any, number: int):
        self._reader, self._number = reader, number
        self._executor: Any = None
        self._lock = threading.Lock()

    def submit(self, *args: Any) -> Future[Any]:
        """Call `reader.read(*args)` in one of the processes.

        Raises:
          DataError: the source cannot be sent to other processes, or they could not be started.
        """
        with self._lock:
            try:
                return (self._executor or self._start()).submit(_read, *args)
            except BrokenExecutor:  # a process was lost; earlier reads have raised the error
                return self._start().submit(_read, *args)

    def _start(self) -> Any:
        begin_read("the start of reader processes", _TO_START)
        executor = _started(self._reader, self._number)
        self._executor, self._end = executor, weakref.finalize(self, executor.shutdown, wait=False, kill_workers=True)
        result_of(executor.submit(os.getpid))
        return executor

    def close(self) -> None:
        """Kill the processes, also while they read. Does not wait for a read or a start in another thread."""
        executor, self._executor = self._executor, None
        if executor is not None:
            self._end()


def result_of(read: Future[Any]) -> Any:
    """Wait for a submitted read, and return its result.

    Raises:
      DataError: a reader process was lost, or the processes were ended.
    """
    try:
        return read.result()
    except RuntimeError as error:
        if type(error).__module__.partition(".")[0] != "loky":
            raise
        raise DataError(
            f"a process that reads examples was lost: {error}\nIf it was killed for memory, lower num_readers=, or "
            "pass data that each process opens itself instead of holding it in memory."
        ) from error


def _started(reader: Any, number: int) -> Any:
    import cloudpickle
    import loky

    try:
        pickled = cloudpickle.dumps(reader)
    except Exception as error:
        raise DataError(
            f"num_readers={number}: the data cannot be sent to other processes: {type(error).__name__}: {error}\n"
            "Let them open files and connections when the first example is read, not before."
        ) from error
    return loky.ProcessPoolExecutor(
        number,
        initializer=_begin,
        initargs=(pickled, os.getpid(), jax.config.jax_enable_x64),
        env={**{name: os.environ.get(name, one) for name, one in _ONE_THREAD.items()}, "JAX_PLATFORMS": "cpu"},
    )


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
    (reader,) = _here
    if isinstance(reader, Exception):
        raise reader
    try:
        return reader.read(*args)
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
