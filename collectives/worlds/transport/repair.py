"""Repair of a communicator after the loss of processes, by MPI's user-level failure mitigation (ULFM).

    revoke   a process that notices a loss interrupts all others that wait in this communicator
    agree    processes that have completed an operation learn that others have not
    shrink   the survivors create a new communicator, without processes that are lost meanwhile
    level    a process that has completed the failed operation sends its result to the others (`operations.py`)
    agree    the survivors check that all have completed these steps; if another process was lost, they repeat them

Open MPI 5 implements ULFM, under `mpirun --with-ft ulfm`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, TypeVar

from collectives.worlds.launch import LaunchError

T = TypeVar("T")

ENABLED = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
COMPONENTS = "OMPI_MCA_coll"
# Excludes Open MPI's collectives for several hosts: after a loss, their Allreduce reported success, with a process's
# own input as its result, in six of eight runs.
WITHOUT_HAN = "^han"
# How Open MPI's TCP sends large messages. By default the receiver requests the data, and the request queues after all
# data that the receiver sends itself. If two ranks send to each other, as in sums, only one direction is used at a
# time: 8 MiB each way at 1 Gbit/s took 139 ms, and 71 ms without requests; on a link as fast as memory 22 and 10 ms.
TCP = "OMPI_MCA_btl_tcp_flags"
WITHOUT_REQUESTS = "send,inplace"


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set Open MPI's options for correct results after losses, and for fast TCP. Call before MPI is loaded."""
    environ.setdefault(TCP, WITHOUT_REQUESTS)
    if enabled(environ):
        environ.setdefault(COMPONENTS, WITHOUT_HAN)


def enabled(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether this job was started with fault tolerance."""
    return environ.get(ENABLED, "").lower() in ("1", "true", "yes")


def survives(lost: str | None, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether a world continues when processes are lost; `lost`: see `world`.

    Raises:
      ValueError: `lost` has another value.
      LaunchError: `lost` is "continue", and the job was not started with fault tolerance.
    """
    if lost not in (None, "continue", "stop"):
        raise ValueError(f'lost={lost!r} must be "continue" or "stop", or None to continue if the launcher allows it.')
    if lost == "continue" and not enabled(environ):
        raise LaunchError(
            'lost="continue" needs an MPI that survives the loss of processes, started with the required flags: Open '
            "MPI 5, started by\n"
            "    adaptive run -n 4 train.py\n"
            'Omit lost= to continue only if that is possible, or set lost="stop".'
        )
    return lost != "stop" and enabled(environ)


def repair(mpi: Any, comm: Any, level: Callable[[Any], T], renew: Callable[[Any], Any] | None = None) -> tuple[Any, T]:
    """Return a communicator of the survivors, and the result of `level`. Called by all survivors.

    `level(new_comm)` lets all survivors complete the failed operation; it may be called several times. `renew(comm)`
    returns the new communicator, collectively; by default `comm` is revoked and shrunk.
    """
    error: Exception | None = None
    while True:
        if renew is None:
            with suppress(mpi.Exception):
                comm.Revoke()
        new = shrink(mpi, comm) if renew is None else renew(comm)
        if error is not None and new.size == comm.size:
            raise error  # no process was lost
        found: list[T] = []
        try:
            found.append(level(new))
            error = None
        except Exception as failed:  # not only MPI's: data of a dead process may be missing without an error from MPI
            error = failed
            with suppress(mpi.Exception):
                new.Revoke()  # others may wait in it for the lost process
        if all_agree(mpi, new, bool(found)):
            return new, found[0]
        comm, error = new, error or mpi.Exception(mpi.ERR_PROC_FAILED)


def shrink(mpi: Any, comm: Any) -> Any:
    """Return a communicator of the survivors. When this returns, all of them have created it."""
    smaller = comm.Shrink()
    smaller.Set_errhandler(mpi.ERRORS_RETURN)
    # Revoking it while a process is still creating it causes a segmentation fault there (Open MPI 5.0.11).
    all_agree(mpi, smaller, True)
    return smaller


def all_agree(mpi: Any, comm: Any, fine: bool) -> bool:
    """Return whether `fine` is true on all processes and none was lost. The same on all processes."""
    try:
        return bool(comm.Agree(int(fine)))
    except mpi.Exception:
        return False
