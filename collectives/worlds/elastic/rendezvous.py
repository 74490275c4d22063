"""Rendezvous: all processes of a job meet, to let processes on standby join, or at the end of a run.

If a process dies during the rendezvous, the others repeat it without that process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from adaptive.base.worker_slots import WorkerSlots
from adaptive.base.world import Loss
from collectives.worlds.transport.process_group import Process, ProcessGroup
from collectives.worlds.transport.repair import all_agree, shrink

from .spawning import SpawnedProcess, enter, merge_in
from .standby import MEET

JOIN, END_RUN, CLOSE, TERMINATE = "join", "end the run", "close", "terminate"
NO_RANK = -1


class Attendee(NamedTuple):
    """The facts that a process reports at a rendezvous."""

    process: Process
    rank: int  # among the working processes; `NO_RANK` on standby
    ready: bool  # to join
    spawned: int = 0  # number of spawned processes that it admits; only the first working process does
    world_number: int = 0  # as the watchdog knows the world; 0 on a spawned process that does not know it yet


class RendezvousPlan(NamedTuple):
    """The members and tasks of all processes after a rendezvous. Replicated."""

    purpose: str
    ranks: tuple[int, ...]  # of the working processes, in the job's new communicator, in the order of their new ranks
    worker_slots: WorkerSlots
    losses: tuple[Loss, ...]


# For one process: the plan, None where no working process is left; the job; the communicator of the working processes,
# MPI.COMM_NULL on the others; and the number of the world.
RendezvousResult = tuple[RendezvousPlan | None, ProcessGroup, Any, int]
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
      mpi: the module `mpi4py.MPI`.
      job: all processes, as this process knows them.
      role: this process's facts.
      make_plan: returns the plan, given the present job and all roles; called on one working process.
      survives: whether MPI survives losses.
      spawned: the spawned processes to admit; only on the first working process.
      entry: on a spawned process that is admitted here: its communicator with the process that spawned it, and the
        content of that process's `MEET` message.
    """
    comm = job.comm if entry is None else None
    everyone = None
    error: Exception | None = None
    while True:
        if comm is not None:
            before, comm = comm, shrink(mpi, comm) if survives else comm.Dup()
            comm.Set_errhandler(mpi.ERRORS_RETURN)
            if error is not None and comm.size == before.size:
                raise error  # no process was lost
            everyone = _admit(mpi, comm, role, spawned, survives=survives)
        else:
            everyone = _enter(mpi, entry)
        found: list[RendezvousResult] = []
        try:
            found.append(_meet(mpi, everyone, role, make_plan))
            error = None
        except Exception as failed:  # not only MPI's: data of a dead process may be missing without an error from MPI
            if not survives:
                raise
            error = failed
            with suppress(mpi.Exception):
                everyone.Revoke()
        if not survives or all_agree(mpi, everyone, bool(found)):
            return found[0]
        comm, error = everyone, error or mpi.Exception(mpi.ERR_PROC_FAILED)
        spawned, role = (), role._replace(spawned=0)  # they are admitted, or dead


def _admit(mpi: Any, comm: Any, role: Attendee, spawned: Sequence[SpawnedProcess], *, survives: bool) -> Any:
    """Admit spawned processes. Returns a communicator of all; where that fails, of the survivors in `comm`."""
    everyone, fine = comm, False
    try:
        roles = comm.allgather(role)
        working = [rank for rank, r in enumerate(roles) if r.rank != NO_RANK]
        first = min(working, key=lambda rank: roles[rank].rank, default=0)
        number = roles[first].spawned if working else 0
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
        for broken in {everyone, comm}:
            with suppress(mpi.Exception):
                broken.Revoke()
    # Needed even if no process is admitted: otherwise a process that noticed a loss would be in another collective.
    if survives and not all_agree(mpi, comm, fine):
        with suppress(mpi.Exception):
            everyone.Revoke()  # releases spawned processes that wait in it
        return shrink(mpi, comm)
    return everyone


def _enter(mpi: Any, entry: Any) -> Any:
    """Return a communicator of all processes; called on a spawned process that is admitted."""
    pair, (first, to_come) = entry
    everyone = enter(mpi, pair)
    for _ in range(to_come):
        everyone = merge_in(mpi, everyone, first, None)
    return everyone


def _meet(mpi: Any, comm: Any, role: Attendee, make_plan: MakePlan) -> RendezvousResult:
    """Exchange facts, decide on the members, and create the communicator of the working processes."""
    roles = comm.allgather(role)
    job = ProcessGroup(comm, tuple(r.process for r in roles))
    world_number = max(r.world_number for r in roles)
    working = [rank for rank, r in enumerate(roles) if r.rank != NO_RANK]
    if not working:
        return None, job, mpi.COMM_NULL, world_number
    first = min(working, key=lambda rank: roles[rank].rank)
    plan = comm.bcast(make_plan(job, roles) if comm.rank == first else None, first)
    works = comm.rank in plan.ranks
    key = plan.ranks.index(comm.rank) if works else comm.rank
    new = comm.Split(0 if works else mpi.UNDEFINED, key)
    if works:
        new.Set_errhandler(mpi.ERRORS_RETURN)
    return plan, job, new, world_number
