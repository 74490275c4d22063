"""All processes of a job come together: to let some in who were in reserve, or because a run is over.

Whoever dies on the way is left out: then they begin anew, with those who are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from adaptive.extend import Loss, Seats

from .processes import Together
from .repair import all_agree

JOIN, TOGETHER, CLOSE, ALL_GO = "join", "together", "close", "all go"
NOBODY = -1


class Role(NamedTuple):
    """What a process is when it comes to a meeting."""

    rank: int  # among those who work; `NOBODY` of one in reserve
    ready: bool  # to join


class Plan(NamedTuple):
    """What is to be after a meeting. Replicated."""

    purpose: str
    together: tuple[int, ...]  # ranks in the job's new communicator, in the order of their new ranks
    seats: Seats
    losses: tuple[Loss, ...]


class Outcome(NamedTuple):
    """What came of a meeting."""

    plan: Plan | None  # `None` where nobody is left who works
    job: Together
    comm: Any  # of those who are together; no communicator for the others


def meeting(
    mpi: Any,
    job: Together,
    role: Role,
    make_plan: Callable[[Together, Sequence[Role]], Plan],
    *,
    survives: bool,
) -> Outcome:
    """Meet. Every process of the job that is alive comes here.

    Args:
      make_plan: what is to be, as one of those who work decides for all; given the job as it is now, and all roles.
      survives: whether MPI survives losses.
    """
    comm = job.comm
    while True:
        everyone = comm.Shrink() if survives else comm.Dup()
        everyone.Set_errhandler(mpi.ERRORS_RETURN)
        found: list[Outcome] = []
        try:
            found.append(_meet(mpi, job.over(everyone), role, make_plan))
        except mpi.Exception:
            if not survives:
                raise
            with suppress(mpi.Exception):
                everyone.Revoke()
        if not survives or all_agree(mpi, everyone, bool(found)):
            return found[0]
        comm = everyone


def _meet(mpi: Any, job: Together, role: Role, make_plan: Callable[[Together, Sequence[Role]], Plan]) -> Outcome:
    comm = job.comm
    roles = comm.allgather(role)
    working = [rank for rank, r in enumerate(roles) if r.rank != NOBODY]
    if not working:
        return Outcome(None, job, mpi.COMM_NULL)
    first = min(working, key=lambda rank: roles[rank].rank)
    plan = comm.bcast(make_plan(job, roles) if comm.rank == first else None, first)
    takes_part = comm.rank in plan.together
    key = plan.together.index(comm.rank) if takes_part else comm.rank
    new = comm.Split(0 if takes_part else mpi.UNDEFINED, key)
    if takes_part:
        new.Set_errhandler(mpi.ERRORS_RETURN)
    return Outcome(plan, job, new)
