"""Rendezvous: all processes of a job meet, at each change of members during a run, and at its end.

If a process dies during the rendezvous, the others repeat it without that process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from adaptive.base.worker_slots import WorkerSlots
from adaptive.base.world import Loss
from collectives.worlds.transport.process_group import Process, ProcessGroup
from collectives.worlds.transport.repair import all_agree, repair, shrink

from .spawning import SpawnedProcess, enter, merge_in
from .standby import MEET

CHANGE, END_RUN, CLOSE, TERMINATE = "change the members", "end the run", "close", "terminate"
NO_RANK = -1


class Attendee(NamedTuple):
    """A process at a rendezvous, and what it reports."""

    process: Process
    rank: int  # among the working processes; `NO_RANK` on standby
    ready: bool  # to join
    spawned: int = 0  # number of spawned processes that it admits; only the first working process does


class RendezvousPlan(NamedTuple):
    """The members and tasks of all processes after a rendezvous. Replicated."""

    purpose: str
    ranks: tuple[int, ...]  # of the working processes, in the job's new communicator, in the order of their new ranks
    worker_slots: WorkerSlots
    losses: tuple[Loss, ...]
    sends_state: bool = False  # whether some processes need the state of the others


# For one process: the plan, None where no working process is left; the job; and the communicator of the working
# processes, MPI.COMM_NULL on the others.
RendezvousResult = tuple[RendezvousPlan | None, ProcessGroup, Any]
MakePlan = Callable[[ProcessGroup, Sequence[Attendee]], RendezvousPlan]


def rendezvous(
    mpi: Any,
    job: ProcessGroup,
    role: Attendee,
    make_plan: MakePlan,
    *,
    survives: bool,
    spawned: Sequence[SpawnedProcess] = (),
    entry: Any = None,
) -> RendezvousResult:
    """Meet all processes of the job that are alive. Called by all of them.

    Args:
      make_plan: returns the plan, given the present job and all roles; called on one working process.
      survives: whether MPI survives losses.
      spawned: the spawned processes to admit; only on the first working process.
      entry: on a spawned process that is admitted here: its communicator with the process that spawned it, and the
        content of that process's `MEET` message.
    """

    def renew(comm: Any) -> Any:
        nonlocal entry, role
        if entry is not None:
            everyone, entry = enter(mpi, *entry), None
            return everyone
        comm = shrink(mpi, comm) if survives else comm.Dup()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        everyone = _admit(mpi, comm, role, spawned, survives=survives)
        role = role._replace(spawned=0)  # the next time they are admitted, or dead
        return everyone

    def meet(comm: Any) -> RendezvousResult:
        return _meet(mpi, comm, role, make_plan)

    return repair(mpi, job.comm, meet, renew)[1] if survives else meet(renew(job.comm))


def _admit(mpi: Any, comm: Any, role: Attendee, spawned: Sequence[SpawnedProcess], *, survives: bool) -> Any:
    """Admit spawned processes. Returns a communicator of all; where that fails, of the survivors in `comm`."""
    everyone, fine = comm, False
    try:
        roles = comm.allgather(role)
        first = _first(roles)
        number = roles[first].spawned
        for n in range(number):
            pair = None
            if comm.rank == first:
                pair = spawned[n].pair
                spawned[n].messages.send([1], MEET, (first, number - n - 1))
            everyone = merge_in(mpi, everyone, first, pair)
        fine = True
    except Exception:
        if not survives:
            raise
        for broken in (everyone, comm):
            with suppress(mpi.Exception):
                broken.Revoke()
    # Needed even if no process is admitted: otherwise a process that noticed a loss would be in another collective.
    if survives and not all_agree(mpi, comm, fine):
        with suppress(mpi.Exception):
            everyone.Revoke()  # releases spawned processes that wait in it
        return shrink(mpi, comm)
    return everyone


def _meet(mpi: Any, comm: Any, role: Attendee, make_plan: MakePlan) -> RendezvousResult:
    """Exchange facts, decide on the members, and create the communicator of the working processes."""
    roles = comm.allgather(role)
    job = ProcessGroup(comm, tuple(r.process for r in roles))
    first = _first(roles)
    if roles[first].rank == NO_RANK:
        return None, job, mpi.COMM_NULL
    plan = comm.bcast(make_plan(job, roles) if comm.rank == first else None, first)
    works = comm.rank in plan.ranks
    key = plan.ranks.index(comm.rank) if works else comm.rank
    new = comm.Split(0 if works else mpi.UNDEFINED, key)
    if works:
        new.Set_errhandler(mpi.ERRORS_RETURN)
    return plan, job, new


def _first(roles: Sequence[Attendee]) -> int:
    """Return the attendee that is the first working process; any other one if no process works."""
    return min(range(len(roles)), key=lambda rank: (roles[rank].rank == NO_RANK, roles[rank].rank))


def plan_members(
    purpose: str,
    worker_slots: WorkerSlots,
    losses: tuple[Loss, ...],
    roles: Sequence[Attendee],
    *,
    workers: int = 0,
    leaving: Sequence[int] = (),
) -> RendezvousPlan:
    """Return the plan of a rendezvous of these processes, by their ranks in the job; see `ElasticWorld._rendezvous`.

    Changes `worker_slots`, from which lost workers have been removed.
    """
    working = sorted((r for r, role in enumerate(roles) if role.rank != NO_RANK), key=lambda r: roles[r].rank)
    others = [rank for rank, role in enumerate(roles) if role.rank == NO_RANK]
    if purpose != CHANGE:
        ends = purpose == END_RUN
        return RendezvousPlan(purpose, (*working, *(others if ends else [])), worker_slots, losses, sends_state=ends)
    slots_of = [role.process.worker_slots for role in roles]
    members = [rank for rank in working if slots_of[rank][0] in worker_slots.members]
    staying: list[int] = []
    number = 0
    for rank in sorted(members, key=lambda rank: slots_of[rank][0]):
        if slots_of[rank][0] not in leaving and number + len(slots_of[rank]) <= workers:
            staying.append(rank)
            number += len(slots_of[rank])
    staying = [rank for rank in members if rank in staying] or members  # the last ones stay, also if terminated
    for rank in members:
        for slot in slots_of[rank] if rank not in staying else ():
            worker_slots.leave(slot)
    joining = []
    for rank in others:
        if roles[rank].ready and len(worker_slots.members) + len(slots_of[rank]) <= workers:
            joining.append(rank)
            for slot in slots_of[rank]:
                worker_slots.join(slot)
    return RendezvousPlan(purpose, (*staying, *joining), worker_slots, losses, sends_state=bool(joining))
