"""Rendezvous: all processes of a job meet, to let processes on standby join, or at the end of a run.

If a process dies during the rendezvous, the others repeat it without that process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from adaptive.extend import Loss, WorkerSlots
from collectives.worlds.transport.process_group import Process, ProcessGroup
from collectives.worlds.transport.repair import all_agree, shrink

from .spawning import SpawnedProcess, enter, merge_in
from .standby import MEET

if TYPE_CHECKING:
    from collectives.worlds.watchdog.probe import Peer

JOIN, END_RUN, CLOSE, TERMINATE = "join", "end the run", "close", "terminate"
TAKE_OVER = "take over"  # all working processes are lost, and processes on standby continue from a copy of their state
NO_RANK = NO_COPY = -1
_GENERATIONS = 1 << 32  # more than the lost processes can be ahead of those on standby


class Attendee(NamedTuple):
    """The facts that a process reports at a rendezvous."""

    process: Process
    rank: int  # among the working processes; `NO_RANK` on standby
    ready: bool  # to join
    spawned: int = 0  # number of spawned processes that it admits; only the first working process does
    peer: Peer | None = None  # its contact data, for the others' watchdogs
    copy: int = NO_COPY  # number of the newest copy of the run's state from which a process on standby can continue
    has_place: bool | None = None  # for copies of its state; `None` if it holds none


class RendezvousPlan(NamedTuple):
    """The members and tasks of all processes after a rendezvous. Replicated."""

    purpose: str
    ranks: tuple[int, ...]  # of the working processes, in the job's new communicator, in the order of their new ranks
    worker_slots: WorkerSlots
    losses: tuple[Loss, ...]


class RendezvousResult(NamedTuple):
    """The result of a rendezvous for one process."""

    plan: RendezvousPlan | None  # None where no working process is left, and no copy of the run's state
    job: ProcessGroup
    comm: Any  # of the working processes; MPI.COMM_NULL on the others
    peers: Mapping[Process, Peer]  # contact data of the processes with a watchdog


MakePlan = Callable[[ProcessGroup, Sequence[Attendee]], RendezvousPlan]


def rendezvous(
    mpi: Any,
    job: ProcessGroup,
    role: Attendee,
    make_plan: MakePlan,
    create_places: Callable[[ProcessGroup], None],
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
      make_plan: returns the plan, given the present job and all roles; called on one working process, or, if none is
        left, on the process on standby with the newest copy.
      create_places: creates memory for copies of the run's state, with a place for each process of the job; called on
        all, if they hold copies and one has no place. Collective.
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
            found.append(_meet(mpi, everyone, role, make_plan, create_places))
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


def take_over_plan(
    job: ProcessGroup, roles: Sequence[Attendee], wanted: int, worker_slots: WorkerSlots, losses: tuple[Loss, ...]
) -> RendezvousPlan:
    """Return the plan by which processes on standby replace all working processes, which are lost.

    The process with the newest copy of the run's state gets rank 0. Others join, those that are ready first.

    Args:
      job, roles: all processes that are left, and their facts.
      wanted: the number of workers before.
      worker_slots, losses: without the lost processes. Changed here.
    """
    for slot in worker_slots.members:  # of processes that left before, of which those on standby do not know
        worker_slots.empty(slot)
    worker_slots.generation += _GENERATIONS
    holder = max(range(len(roles)), key=lambda rank: roles[rank].copy)
    others = sorted((rank for rank in range(len(roles)) if rank != holder), key=lambda rank: not roles[rank].ready)
    ranks: list[int] = []
    for rank in (holder, *others):
        process = job.everyone[rank]
        if not ranks or len(worker_slots.members) + len(process.worker_slots) <= wanted:
            ranks.append(rank)
            for slot in process.worker_slots:
                worker_slots.join(slot)
    return RendezvousPlan(TAKE_OVER, tuple(ranks), worker_slots, losses)


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


def _meet(
    mpi: Any, comm: Any, role: Attendee, make_plan: MakePlan, create_places: Callable[[ProcessGroup], None]
) -> RendezvousResult:
    """Exchange facts, decide on the members, and create the communicator of the working processes."""
    roles = comm.allgather(role)
    job = ProcessGroup(comm, tuple(r.process for r in roles))
    peers = {r.process: r.peer for r in roles if r.peer is not None}
    working = [rank for rank, r in enumerate(roles) if r.rank != NO_RANK]
    if not working:
        holder = max(range(len(roles)), key=lambda rank: roles[rank].copy)
        if roles[holder].copy == NO_COPY:
            return RendezvousResult(None, job, mpi.COMM_NULL, peers)
        working = [holder]
    first = min(working, key=lambda rank: roles[rank].rank)
    plan = comm.bcast(make_plan(job, roles) if comm.rank == first else None, first)
    works = comm.rank in plan.ranks
    key = plan.ranks.index(comm.rank) if works else comm.rank
    new = comm.Split(0 if works else mpi.UNDEFINED, key)
    if works:
        new.Set_errhandler(mpi.ERRORS_RETURN)
    places = {r.has_place for r in roles}
    if plan.purpose == JOIN and None not in places and False in places:
        create_places(job)
    return RendezvousResult(plan, job, new, peers)
