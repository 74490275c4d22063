"""All processes of a job come together: to let some in who were in reserve, or because a run is over.

Whoever dies on the way is left out: then they begin anew, with those who are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from adaptive.extend import Loss, Seats
from collectives.worlds.transport.process_group import Process, ProcessGroup
from collectives.worlds.transport.repair import all_agree, shrunk

from .spawning import SpawnedProcess, entered, merged
from .standby import MEET

JOIN, TOGETHER, CLOSE, ALL_GO = "join", "together", "close", "all go"
NOBODY = -1


class Attendee(NamedTuple):
    """What a process is when it comes to a meeting."""

    process: Process
    rank: int  # among those who work; `NOBODY` of one in reserve
    ready: bool  # to join
    recruits: int = 0  # whom the first of those who work lets in


class RendezvousPlan(NamedTuple):
    """What is to be after a meeting. Replicated."""

    purpose: str
    together: tuple[int, ...]  # ranks in the job's new communicator, in the order of their new ranks
    seats: Seats
    losses: tuple[Loss, ...]


class RendezvousResult(NamedTuple):
    """What came of a meeting."""

    plan: RendezvousPlan | None  # `None` where nobody is left who works
    job: ProcessGroup
    comm: Any  # of those who are together; no communicator for the others


def rendezvous(
    mpi: Any,
    job: ProcessGroup,
    role: Attendee,
    make_plan: Callable[[ProcessGroup, Sequence[Attendee]], RendezvousPlan],
    *,
    survives: bool,
    recruits: Sequence[SpawnedProcess] = (),
    pair: Any = None,
) -> RendezvousResult:
    """Meet. Every process of the job that is alive comes here.

    Args:
      make_plan: what is to be, as one of those who work decides for all; given the job as it is now, and all roles.
      survives: whether MPI survives losses.
      recruits: whom this process has spawned, and lets in, if it is the first of those who work.
      pair: the communicator of a recruit with whoever has spawned it: this process is let in.
    """
    comm = job.comm if pair is None else None
    everyone = None
    error: Exception | None = None
    while True:
        if comm is not None:
            before, comm = comm, shrunk(mpi, comm) if survives else comm.Dup()
            comm.Set_errhandler(mpi.ERRORS_RETURN)
            if error is not None and comm.size == before.size:
                raise error  # nobody was lost
            everyone = _admit(mpi, comm, role, recruits, survives=survives)
        else:
            everyone = _enter(mpi, pair)
        found: list[RendezvousResult] = []
        try:
            found.append(_meet(mpi, everyone, role, make_plan))
            error = None
        except Exception as failed:  # of what has died MPI may have brought nothing, and not have said so
            if not survives:
                raise
            error = failed
            with suppress(mpi.Exception):
                everyone.Revoke()
        if not survives or all_agree(mpi, everyone, bool(found)):
            return found[0]
        comm, error = everyone, error or mpi.Exception(mpi.ERR_PROC_FAILED)
        recruits, role = (), role._replace(recruits=0)  # they are in, or gone


def _admit(mpi: Any, comm: Any, role: Attendee, recruits: Sequence[SpawnedProcess], *, survives: bool) -> Any:
    """Let recruits in. A communicator of all; where that fails, of those who were there before."""
    everyone, fine = comm, False
    try:
        roles = comm.allgather(role)
        working = [rank for rank, r in enumerate(roles) if r.rank != NOBODY]
        first = min(working, key=lambda rank: roles[rank].rank, default=0)
        number = roles[first].recruits if working else 0
        for n in range(number):
            pair = None
            if comm.rank == first:
                pair = recruits[n].pair
                recruits[n].words.send([1], MEET, (first, number - n - 1))
            everyone = merged(mpi, everyone, first, pair)
        fine = True
    except Exception:
        if not survives:
            raise
        for broken in {everyone, comm}:
            with suppress(mpi.Exception):
                broken.Revoke()
    # Also where nobody is let in: one who was told of a loss here would be in another collective than the rest.
    if survives and not all_agree(mpi, comm, fine):
        with suppress(mpi.Exception):
            everyone.Revoke()  # recruits that are in give up
        return shrunk(mpi, comm)
    return everyone


def _enter(mpi: Any, pair: Any) -> Any:
    pair, (first, to_come) = pair
    everyone = entered(mpi, pair)
    for _ in range(to_come):
        everyone = merged(mpi, everyone, first, None)
    return everyone


def _meet(
    mpi: Any, comm: Any, role: Attendee, make_plan: Callable[[ProcessGroup, Sequence[Attendee]], RendezvousPlan]
) -> RendezvousResult:
    roles = comm.allgather(role)
    job = ProcessGroup(comm, tuple(r.process for r in roles))
    working = [rank for rank, r in enumerate(roles) if r.rank != NOBODY]
    if not working:
        return RendezvousResult(None, job, mpi.COMM_NULL)
    first = min(working, key=lambda rank: roles[rank].rank)
    plan = comm.bcast(make_plan(job, roles) if comm.rank == first else None, first)
    takes_part = comm.rank in plan.together
    key = plan.together.index(comm.rank) if takes_part else comm.rank
    new = comm.Split(0 if takes_part else mpi.UNDEFINED, key)
    if takes_part:
        new.Set_errhandler(mpi.ERRORS_RETURN)
    return RendezvousResult(plan, job, new)
