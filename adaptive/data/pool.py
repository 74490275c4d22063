"""Reader processes, for sources whose `data[i]` takes long.

They are processes of loky, started by fork and exec, so that neither JAX's threads nor MPI are copied, and without
running the user's script again, which needs no `if __name__ == "__main__"`. Each receives the source once, by
cloudpickle. A pool that reads a fixed sequence, like grain's, does not fit: the next reads depend on the batch sizes.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import signal
import threading
import time
import traceback
import weakref
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import DataError
from adaptive.base.python_stacks import shortened, write_stacks_upon_signal, written_stacks

from .read_watch import STATUS_BYTES, CurrentRead, CurrentReads, read_status, words_of
from .reading import ExampleReader, Passes, joined

_CHUNKS = 4  # chunks of a batch per process, which balances the processes
_LARGEST_CHUNK = 256

# Reader processes do not use devices, and libraries' threads would oversubscribe the cores.
_SURROUNDINGS = {
    "JAX_PLATFORMS": "cpu",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


class Pool:
    """Reader processes of one source, which start at the first read.

    Args:
      reading: the source and its functions; sent to each process once.
      num_readers: number of processes.
    """

    def __init__(self, reading: ExampleReader, num_readers: int):
        self._reading, self.num_readers = reading, num_readers
        self._executor: Any = None
        self._lock = threading.Lock()

    def submit(self, indices: np.ndarray, passes: Passes) -> Future[Any]:
        """Start to read the examples at these indices in one process; the future returns them as a batch."""
        with self._lock:
            try:
                future = self._ready().submit(_read, indices, passes)
            except BrokenExecutor:  # a process was lost; earlier futures have raised the error
                self._executor = None
                future = self._ready().submit(_read, indices, passes)
            _end_before_loky_waits(self._executor)
            return future

    def _ready(self) -> Any:
        if self._executor is None:
            self._executor = _started(self._reading, self.num_readers)
            self._finalizer = weakref.finalize(self, _end, self._executor)
        return self._executor

    def rows(self, indices: np.ndarray, passes: Passes) -> Any:
        """Read the examples at these indices by all processes, and return them as one batch."""
        size = chunk(len(indices), self.num_readers)
        parts = [slice(start, start + size) for start in range(0, len(indices), size)]
        futures = [self.submit(indices[part], passes.part(part)) for part in parts]
        return joined([result(future) for future in futures])

    def current_reads(self) -> list[CurrentRead]:
        """Return the read of each process, the oldest first, and the processes that are starting or stopped."""
        executor = self._executor
        found = [_current_read(pid) for pid in list(executor._processes or ())] if executor is not None else []
        return sorted((read for read in found if read is not None), key=lambda read: read.since or math.inf)

    def close(self) -> None:
        """Kill the processes, also while they read."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            self._finalizer()


def chunk(examples: int, num_readers: int) -> int:
    """Return the number of examples of a batch that one reader process reads per task."""
    return min(max(1, -(-examples // (_CHUNKS * num_readers))), _LARGEST_CHUNK)


class ReadersLostError(DataError):
    """Reader processes were lost or ended, with all reads that were submitted to them."""


def result(future: Future[Any]) -> Any:
    """Wait for a submitted read, and return its batch.

    Raises:
      ReadersLostError: a reader process was lost, or the processes were ended.
    """
    try:
        return future.result()
    except RuntimeError as error:
        if type(error).__name__ == "ShutdownExecutorError":  # of loky, which is imported only on demand
            raise ReadersLostError("the reader processes were ended before they had read these examples") from error
        if not isinstance(error, BrokenExecutor):
            raise
        raise ReadersLostError(
            f"a process that reads examples was lost: {error}\nIf it was killed for memory, lower num_readers=, or "
            "pass data that each process opens itself instead of holding it in memory."
        ) from error


def _started(reading: ExampleReader, num_readers: int) -> Any:
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


_executors: weakref.WeakSet[Any] = weakref.WeakSet()


def _end_before_loky_waits(executor: Any) -> None:
    """Register an exit hook that ends an executor before loky's own exit hook waits for its submitted tasks.

    Called after the first task was submitted, when loky has registered its hook: hooks run in reverse order.
    """
    if not _executors:
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            with suppress(RuntimeError):  # the interpreter exits already
                register(_end_all)
    _executors.add(executor)


def _end_all() -> None:
    for executor in list(_executors):
        _end(executor)


# --- current reads of reader processes --------------------------------------------------------------------------------

# Each reader process has an open file without a name. It begins with the current read, followed by the stacks that the
# process writes on a signal.
_FILE = "adaptive-reader-"


def _current_read(pid: int) -> CurrentRead | None:
    """Return the current read of a reader process; `None` if it is idle or has ended."""
    import psutil

    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return None
    asleep = state == psutil.STATUS_DISK_SLEEP
    reader = f"reader process {pid}" + (", in the kernel: a disk, or a network file system" if asleep else "")
    stopped = state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    if stopped:
        reader += f", stopped (SIGSTOP, Ctrl-Z or a debugger: `kill -CONT {pid}` lets it go on)"
    file, status = _file_of(pid)
    number, count, since = read_status(status) if status else (-1, 0, 0.0)
    if not status:
        what = "the start of a process that reads"
    elif not since and not stopped:
        return None
    else:
        what = words_of(number, count, "of the data") if number >= 0 and since else "the pickled data set"
        what = what if since else "examples"
    starts = not status or (number < 0 and since > 0)
    return CurrentRead(what, reader, since, lambda: "" if stopped else _stack(pid, file), starts)


def _stack(pid: int, file: int) -> str:
    threads = [block.strip() for block in written_stacks(pid, file).split("\n\n")]
    return shortened("\n".join(block for block in threads if "_leave_with" not in block))


def _file_of(pid: int) -> tuple[int, bytes]:
    """Return the descriptor of a reader process's file and the status bytes in it; -1 and b"" if there is none."""
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                if _FILE in os.readlink(f"{folder}/{name}"):
                    with open(f"{folder}/{name}", "rb") as file:
                        status = file.read(STATUS_BYTES)
                        return int(name), status if len(status) == STATUS_BYTES else b""
    return -1, b""


# --- in a reader process ----------------------------------------------------------------------------------------------

_here: list[ExampleReader | Exception] = []


def _begin(pickled: bytes, parent: int, wide: bool) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # sent to the whole job: the parent decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    jax.config.update("jax_enable_x64", wide)
    file = write_stacks_upon_signal(_FILE)
    reads = CurrentReads()
    try:
        if file >= 0:
            os.ftruncate(file, mmap.PAGESIZE)
            os.lseek(file, 0, os.SEEK_END)
            reads.write_to(mmap.mmap(file, mmap.PAGESIZE))
        reads.begin("the pickled data set")
        reading = pickle.loads(pickled)
        reads.end()
        reading.reads = reads
        _here.append(reading)
    except Exception as error:
        _here.append(_sendable(error))


def _leave_with(parent: int) -> None:
    """End this process when its parent has ended; nothing else ends it if the parent is killed."""
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
    """Return an error that can be pickled, with a note on where it was raised."""
    where = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = DataError(f"{type(error).__name__}: {error}")
    error.add_note(f"raised in a process that reads examples:\n{where}")
    return error
