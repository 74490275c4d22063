"""What remains of a communicator when some of its processes are lost: MPI's user-level failure mitigation (ULFM).

    revoke   whoever notices makes all others notice, whatever they wait for in this communicator
    agree    those who have completed an operation on which all agree learn that others have not
    shrink   those who are left get a communicator of their own; a process that is lost meanwhile is no part of it
    level    who completed the operation that failed for others hands on its result (`operations.py`)
    agree    all know that all came through; if a process was lost on the way, from the beginning

Open MPI 5 has it, under `mpirun --with-ft ulfm`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, TypeVar

from collectives.worlds.launch import LaunchError

T = TypeVar("T")

ENABLED = "OMPI_MCA_mpi_ft_enable"  # mpirun sets it where it was told --with-ft ulfm
COMPONENTS = "OMPI_MCA_coll"
# Of Open MPI's collectives for several hosts: with it survivors of a loss were told that an Allreduce had succeeded,
# and got their own input as its result, in six of eight runs.
WITHOUT_HAN = "^han"
# How Open MPI's TCP sends what is large. By default the receiver asks for it, and waits with that behind all that it
# has to send itself: where two ranks send to each other, as in sums, one direction at a time is used. 8 MiB each way
# at 1 Gbit/s took 139 ms, so 71, and 22 and 10 on a link as fast as memory.
TCP = "OMPI_MCA_btl_tcp_flags"
WITHOUT_ASKING = "send,inplace"


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before MPI is loaded: leave out what gives wrong results when processes are lost, and what halves TCP's speed."""
    environ.setdefault(TCP, WITHOUT_ASKING)
    if enabled(environ):
        environ.setdefault(COMPONENTS, WITHOUT_HAN)


def enabled(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Whether this job was started so that losses can be survived."""
    return environ.get(ENABLED, "").lower() in ("1", "true", "yes")


def survives(lost: str | None, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Whether a world goes on when processes are lost.

    Args:
      lost: "continue", "stop", or `None`: as the job was started.

    Raises:
      ValueError: something else.
      LaunchError: it was asked for, and the job was started otherwise.
    """
    if lost not in (None, "continue", "stop"):
        raise ValueError(f'lost= is "continue" or "stop", or None for what the launcher allows; got {lost!r}.')
    if lost == "continue" and not enabled(environ):
        raise LaunchError(
            'lost="continue" needs an MPI that survives the loss of processes, and a launcher that was told so: Open '
            "MPI 5, started by\n"
            "    adaptive run -n 4 train.py\n"
            'Leave lost= out to go on where that is so, and to stop elsewhere; or say lost="stop".'
        )
    return lost != "stop" and enabled(environ)


def repaired(mpi: Any, comm: Any, level: Callable[[Any], T]) -> tuple[Any, T]:
    """A communicator of those who are left, and what `level` returned in it. All of them come here.

    Args:
      level: communicates in the communicator that it is given; may be called several times.
    """
    error: Exception | None = None
    while True:
        with suppress(mpi.Exception):
            comm.Revoke()
        smaller = shrunk(mpi, comm)
        if error is not None and smaller.size == comm.size:
            raise error  # nobody was lost
        found: list[T] = []
        try:
            found.append(level(smaller))
            error = None
        except Exception as failed:  # of what has died MPI may have brought nothing, and not have said so
            error = failed
            with suppress(mpi.Exception):
                smaller.Revoke()  # others may wait in it for whoever was lost
        if all_agree(mpi, smaller, bool(found)):
            return smaller, found[0]
        comm, error = smaller, error or mpi.Exception(mpi.ERR_PROC_FAILED)


def shrunk(mpi: Any, comm: Any) -> Any:
    """A communicator of those who are left; all of them have it when this returns."""
    smaller = comm.Shrink()
    smaller.Set_errhandler(mpi.ERRORS_RETURN)
    # One that is still making it would die by its revocation, of a segmentation fault (Open MPI 5.0.11).
    all_agree(mpi, smaller, True)
    return smaller


def all_agree(mpi: Any, comm: Any, fine: bool) -> bool:
    """Whether all say so, and nobody was lost; the same answer on all."""
    try:
        return bool(comm.Agree(int(fine)))
    except mpi.Exception:
        return False
