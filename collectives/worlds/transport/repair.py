"""Repair of a communicator after the loss of processes, by MPI's user-level failure mitigation (ULFM).

    revoke   a process that notices a loss makes all others notice, whatever they wait for in this communicator
    agree    processes that have completed an operation learn that others have not
    shrink   the survivors make a communicator of their own; processes that are lost meanwhile are not part of it
    level    a process that has completed the failed operation hands on its result (`operations.py`)
    agree    all survivors know that all have come through; if a process was lost on the way, they start again

Open MPI 5 implements it, under `mpirun --with-ft ulfm`.
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
# Excludes Open MPI's collectives for several hosts: with them, survivors of a loss were told that an Allreduce had
# succeeded, with their own input as its result, in six of eight runs.
WITHOUT_HAN = "^han"
# How Open MPI's TCP sends large messages. By default the receiver requests the data, and the request waits behind all
# that it has to send itself: where two ranks send to each other, as in sums, one direction at a time is used. 8 MiB
# each way at 1 Gbit/s took 139 ms, and 71 without requests; 22 and 10 on a link as fast as memory.
TCP = "OMPI_MCA_btl_tcp_flags"
WITHOUT_REQUESTS = "send,inplace"


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set options of Open MPI for right results after losses and fast TCP. Call before MPI is loaded."""
    environ.setdefault(TCP, WITHOUT_REQUESTS)
    if enabled(environ):
        environ.setdefault(COMPONENTS, WITHOUT_HAN)


def enabled(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether this job was started so that losses can be survived."""
    return environ.get(ENABLED, "").lower() in ("1", "true", "yes")


def survives(lost: str | None, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether a world continues when processes are lost.

    Args:
      lost: "continue", "stop", or None: as the job was started.

    Raises:
      ValueError: `lost` is something else.
      LaunchError: "continue", and the job was started so that it cannot.
    """
    if lost not in (None, "continue", "stop"):
        raise ValueError(f'lost= is "continue" or "stop", or None for what the launcher allows; got {lost!r}.')
    if lost == "continue" and not enabled(environ):
        raise LaunchError(
            'lost="continue" needs an MPI that survives the loss of processes, started with the required flags: Open '
            "MPI 5, started by\n"
            "    adaptive run -n 4 train.py\n"
            'Omit lost= to continue where that is possible and to stop elsewhere, or set lost="stop".'
        )
    return lost != "stop" and enabled(environ)


def repair(mpi: Any, comm: Any, level: Callable[[Any], T]) -> tuple[Any, T]:
    """Return a communicator of the survivors, and what `level` returned in it. All survivors call this.

    Args:
      level: communicates in the communicator that it is given; may be called several times.
    """
    error: Exception | None = None
    while True:
        with suppress(mpi.Exception):
            comm.Revoke()
        smaller = shrink(mpi, comm)
        if error is not None and smaller.size == comm.size:
            raise error  # no process was lost
        found: list[T] = []
        try:
            found.append(level(smaller))
            error = None
        except Exception as failed:  # MPI may deliver nothing of what a dead process sent, without reporting an error
            error = failed
            with suppress(mpi.Exception):
                smaller.Revoke()  # others may wait in it for the process that was lost
        if all_agree(mpi, smaller, bool(found)):
            return smaller, found[0]
        comm, error = smaller, error or mpi.Exception(mpi.ERR_PROC_FAILED)


def shrink(mpi: Any, comm: Any) -> Any:
    """Return a communicator of the survivors; all of them have it when this returns."""
    smaller = comm.Shrink()
    smaller.Set_errhandler(mpi.ERRORS_RETURN)
    # Revoked while a process still makes it, it ends that process by a segmentation fault (Open MPI 5.0.11).
    all_agree(mpi, smaller, True)
    return smaller


def all_agree(mpi: Any, comm: Any, fine: bool) -> bool:
    """Return whether `fine` is true on all processes and none was lost; the same on all."""
    try:
        return bool(comm.Agree(int(fine)))
    except mpi.Exception:
        return False
