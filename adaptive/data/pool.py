"""Processes that read examples beside this one, for sources whose `data[i]` takes long.

They are loky's: started by fork and exec, so that neither JAX's threads nor MPI are copied, and without running the
user's script again, which needs no `if __name__ == "__main__"`. Each is given the source once, by cloudpickle. A pool
that goes through a fixed sequence, as grain's does, will not do here: what is read next changes with the batch sizes.
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
import numpy as np

from adaptive.base.errors import DataError

from .reading import Passes, Reading, joined

_CHUNKS = 4  # of a batch, for each process: so that all have something to do until the end
_LARGEST_CHUNK = 256

# They compute nothing on a device, and as many of them as there are cores leave no core for threads.
_SURROUNDINGS = {
    "JAX_PLATFORMS": "cpu",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


class Pool:
    """Processes that read. They are started when the first example is asked for.

    Args:
      reading: what they read; sent to each once.
      num_readers: how many.
    """

    def __init__(self, reading: Reading, num_readers: int):
        self._reading, self.num_readers = reading, num_readers
        self._executor: Any = None
        self._lock = threading.Lock()

    def submit(self, indices: np.ndarray, passes: Passes) -> Future[Any]:
        """The examples numbered `indices`, stacked, as soon as a process has read them."""
        with self._lock:
            try:
                return self._ready().submit(_read, indices, passes)
            except BrokenExecutor:  # whoever waited for what was lost with it has been told
                self._executor = None
                return self._ready().submit(_read, indices, passes)

    def _ready(self) -> Any:
        if self._executor is None:
            self._executor = _started(self._reading, self.num_readers)
            self._finalizer = weakref.finalize(self, _end, self._executor)
        return self._executor

    def rows(self, indices: np.ndarray, passes: Passes) -> Any:
        """The same by all processes, waited for."""
        size = chunk(len(indices), self.num_readers)
        parts = [slice(start, start + size) for start in range(0, len(indices), size)]
        futures = [self.submit(indices[part], passes.part(part)) for part in parts]
        return joined([result(future) for future in futures])

    def close(self) -> None:
        """End the processes, whatever they do."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            self._finalizer()


def chunk(examples: int, num_readers: int) -> int:
    """How many of so many examples one of several processes is given at once."""
    return min(max(1, -(-examples // (_CHUNKS * num_readers))), _LARGEST_CHUNK)


def result(future: Future[Any]) -> Any:
    """What was submitted, waited for."""
    try:
        return future.result()
    except BrokenExecutor as error:
        raise DataError(
            f"a process that reads examples was lost: {error}\nIf it was killed for memory, lower num_readers=, or "
            "give data that each of them opens for itself instead of holding them."
        ) from error


def _started(reading: Reading, num_readers: int) -> Any:
    import cloudpickle
    import loky

    try:
        pickled = cloudpickle.dumps(reading)
    except Exception as error:
        raise DataError(
            f"num_readers={num_readers}: the data cannot be sent to other processes: {type(error).__name__}: {error}\n"
            "Let them open files and connections when the first example is read, not before."
        ) from error
    args = (pickled, os.getpid(), jax.config.jax_enable_x64)
    return loky.ProcessPoolExecutor(
        num_readers,
        initializer=_begin,
        initargs=args,
        env={
            name: os.environ.get(name, value) if name != "JAX_PLATFORMS" else value
            for name, value in _SURROUNDINGS.items()
        },
    )


def _end(executor: Any) -> None:
    executor.shutdown(wait=False, kill_workers=True)


# --- in a process that reads ------------------------------------------------------------------------------------------

_here: list[Reading | Exception] = []


def _begin(pickled: bytes, parent: int, wide: bool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # meant for the whole job: the parent decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    jax.config.update("jax_enable_x64", wide)
    try:
        _here.append(pickle.loads(pickled))
    except Exception as error:
        _here.append(_sendable(error))


def _leave_with(parent: int) -> None:
    """Nobody else ends this process if its parent is killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _read(indices: np.ndarray, passes: Passes) -> Any:
    (reading,) = _here
    if isinstance(reading, Exception):
        raise reading
    try:
        return reading.rows(indices, passes)
    except Exception as error:
        raise _sendable(error) from None


def _sendable(error: Exception) -> Exception:
    """An error that another process can make again, with where it was raised."""
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = DataError(f"{type(error).__name__}: {error}")
    error.add_note(f"raised in a process that reads examples:\n{where}")
    return error
