"""Start the worker processes of PyTorch's loaders without forking the training process.

A loader forks its workers by default. The training process holds MPI, XLA and many threads, none of which survive a
fork. Instead, each training process starts one server by fork and exec, which imports only torch and forks the workers.
So a worker starts in milliseconds, and the user's script does not run again: cloudpickle sends the workers' code.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import context, popen_forkserver, reduction, spawn, util
from multiprocessing.forkserver import ForkServer, read_signed
from typing import Any

from adaptive.base.errors import DataError

# Signals that a launcher or a terminal sends to the whole process group. The server must survive them: the training
# process decides when reading ends.
_FOR_THE_JOB = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class LoaderContext(context.ForkServerContext):
    """A `multiprocessing_context` for `torch.utils.data.DataLoader`."""

    def Process(self, *args: Any, **options: Any) -> _Process:  # type: ignore[override]
        """Return a process that the server forks."""
        return _Process(*args, **options)

    def Queue(self, maxsize: int = 0) -> Any:
        """Return a queue whose items may be of classes that the script defines; it sends tensors through shared memory,
        like torch's own queues.
        """
        from loky.backend.queues import Queue

        return Queue(maxsize, reducers=_reducers(of_torch=True), ctx=self)


def _reducers(*, of_torch: bool) -> dict[type, Callable[..., Any]]:
    """Return the registered pickle reducers by type: those of torch (tensors), or all others (pipes, locks)."""
    registered = reduction.ForkingPickler(io.BytesIO()).dispatch_table
    from_torch = {kind for kind in registered if kind.__module__.partition(".")[0] == "torch"}
    return {kind: reduce for kind, reduce in registered.items() if (kind in from_torch) == of_torch}


def _dumps(value: Any) -> bytes:
    """Pickle for a process that is being started. Copies tensors, since the server accepts few file descriptors."""
    from loky.backend.reduction import dumps

    return bytes(dumps(value, reducers=_reducers(of_torch=False)))


class _Process(context.ForkServerProcess):
    """A process whose function is sent by cloudpickle."""

    @staticmethod
    def _Popen(process: Any) -> Any:
        return _Popen(process)

    def __reduce__(self) -> Any:
        import cloudpickle

        # By value: importing this package, and with it JAX, would dominate the start of a worker.
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        try:
            work = _dumps((self._target, self._args, self._kwargs))  # type: ignore[attr-defined]
        except Exception as error:
            raise DataError(
                f"the loader has num_workers > 0, and what they need cannot be sent to other processes: "
                f"{type(error).__name__}: {error}\nLet the data set open files and connections when its first example "
                "is read, not before; or set num_workers=0."
            ) from error
        plain = multiprocessing.get_context("forkserver").Process()
        plain.__dict__.update(self.__dict__, _target=_work, _args=(work, os.getpid()), _kwargs={})
        return cloudpickle.loads, (_dumps(plain),)


def _work(work: bytes, trainer: int) -> None:
    """Run a loader's worker in its process, which ends when the training process ends for any reason."""
    import os
    import pickle
    import signal
    import threading
    from multiprocessing import connection, process

    del trainer
    os.setpgid(0, 0)  # signals to the job's process group are meant for the training process
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ["JAX_PLATFORMS"] = "cpu"

    def leave_with_parent() -> None:
        parent = process.parent_process()
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    target, args, options = pickle.loads(work)
    target(*args, **options)


class _Popen(popen_forkserver.Popen):
    """A process started by this module's server, without running the user's script."""

    _fds: list[int]

    def _launch(self, process: Any) -> None:
        prepared = spawn.get_preparation_data(process.name)
        for main in ("init_main_from_name", "init_main_from_path"):
            prepared.pop(main, None)
        sent = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(prepared, sent)
            reduction.dump(process, sent)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, write = _new_process(self._fds)
        held = os.dup(write)  # the process ends when this is closed
        self.finalizer = util.Finalize(self, _close, (held, self.sentinel))
        with open(write, "wb", closefd=True) as pipe:
            pipe.write(sent.getbuffer())
        self.pid = read_signed(self.sentinel)


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


_server = ForkServer()
_server.set_forkserver_preload(["torch", "torch.utils.data", "cloudpickle", "loky.backend.queues"])


def _new_process(fds: list[int]) -> tuple[int, int]:
    """Let the server fork a process; start the server if necessary. Returns this end of the new process's two pipes."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_JOB)  # the server inherits the mask
    try:
        return _server.connect_to_new_process(fds)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
