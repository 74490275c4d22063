"""Elastic jobs: which processes work and which are on standby, and the changes between the two during a run.

All methods use the same replicated state (members, standby processes, requests), so the class is in one file; control
messages, spawning and the rendezvous have files of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np

from adaptive import Preempted, ReserveReleased, WorkerCountError, WorkerError
from adaptive.base.signals import acknowledge_termination, pending_termination
from adaptive.base.worker_slots import WorkerSlots, number_of_workers
from adaptive.base.world import Loss, TransferPayload
from collectives.worlds.transport.mpi_transport import MPITransport
from collectives.worlds.transport.operations import RENDEZVOUS, FinalOperation, Operation, Regroup, StateTransfer
from collectives.worlds.transport.process_group import Process, ProcessGroup
from launchers import ending

from .rendezvous import (
    CLOSE,
    END_RUN,
    JOIN,
    NO_RANK,
    TERMINATE,
    Attendee,
    RendezvousPlan,
    rendezvous,
)
from .spawning import SpawnedProcess, Spawner, SpawnRequest
from .standby import (
    ALL_LOST,
    ASK,
    FAILED,
    MEET,
    MEMBERS,
    READY,
    REFUSED,
    TERMINATED,
    WORKERS_LOST,
    ControlMessages,
    StandbyLoop,
)

MOST_WORKERS = 1 << 20
TERMINATION_SECONDS = 0.3  # time from a termination signal until a process on standby acts on it

_log = logging.getLogger("adaptive")


class ElasticProcesses:
    """The processes of a job, each with its workers. Some processes work; the others are on standby.

    All workers of a process join or leave together. Between two runs, all processes perform operations together. During
    a run, only the working processes do, and those on standby wait for control messages (`standby.py`). All processes
    meet again at a `rendezvous`.

    Args:
      transport: runs the operations of the working processes.
      everyone: all processes of the job.
      worker_slots: the worker slots, and which of them are occupied.
      respawn: whether lost or terminated workers are replaced.
      spawns: whether processes may be spawned.
      abandon: closes the world on this process alone.
      build_digests: returns digests of this process's program. A spawned process must have the same.

    Attributes:
      capacity: number of worker slots. Replicated.
      worker_slots: the worker slots, and which of them are occupied. Replicated.
      generation: number of times that workers have left or joined. Replicated.
      losses: the processes that were lost so far, in order. Replicated.
      workers: the worker slots of this process. Local.
      unowned_slots: the empty worker slots that belong to no process of the group. Replicated.
      in_reserve: whether this process is on standby, or must go on standby. Local.
      run_under_way: whether a run is under way in which processes can be on standby. Replicated.
      needs_state_transfer: whether a process has joined that has not received the run's state. Replicated.
    """

    def __init__(
        self,
        transport: MPITransport,
        everyone: ProcessGroup,
        worker_slots: WorkerSlots,
        *,
        respawn: bool,
        spawns: bool,
        abandon: Callable[[], None],
        build_digests: Callable[[], Mapping[str, str]],
    ):
        self._transport, self._mpi, self._abandon = transport, transport.mpi, abandon
        self.respawn, self.spawns = respawn, spawns
        self.worker_slots, self.capacity = worker_slots, worker_slots.capacity
        self.generation, self.losses = 0, ()
        self._build_digests = build_digests
        self.in_reserve = self.run_under_way = self.needs_state_transfer = False
        # The workers' communicator cannot be used: it is revoked when a worker is lost.
        whole = everyone.comm.Dup()
        whole.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._job = ProcessGroup(whole, everyone.everyone)
        self.workers = everyone.everyone[everyone.comm.rank].worker_slots
        self._messages = ControlMessages(self._mpi, whole)
        self._standby = [process for process in everyone.everyone if not self._works(process)]  # replicated
        self._working_ranks: Sequence[int] = ()  # in the job, as far as this process knows
        self._has_state = True  # of the run
        self.spawner = Spawner(self._mpi)
        self._requested = len(self.members)
        self._asked: set[int] = set()  # ranks in the job that were asked to get ready; rank 0 knows
        self._ready: set[int] = set()
        self._standby_terminated = False  # a process on standby has received a termination signal; rank 0 knows
        self._termination_sent = False
        self._is_ready: Callable[[], bool] = lambda: True
        self._pair: Any = None  # of a spawned process, until it is admitted: its communicator with the one that spawned
        self._entry: Any = None  # that communicator, and the content of the `MEET` message
        transport.on_lost = self._continue_with
        self._set_group(everyone)

    losses: tuple[Loss, ...]

    def _set_group(self, group: ProcessGroup) -> None:
        self._transport.set_group(group)
        carried = {slot for process in group.everyone for slot in process.worker_slots}
        self.unowned_slots = tuple(slot for slot in range(self.capacity) if slot not in carried)

    def check_start(self, workers: int | None) -> None:
        """Check that whole processes can provide the number of workers that a user has asked for at the start.

        Raises:
          WorkerCountError: they cannot.
        """
        if workers is not None and self.nearest(workers) != workers:
            raise WorkerCountError(
                f"workers={workers} is not possible: all workers of a process work, or none. The nearest possible "
                f"number is {self.nearest(workers)}."
            )

    # --- which processes there are ------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The worker slots that are occupied, in order. Replicated."""
        return self.worker_slots.members

    @property
    def least(self) -> int:
        """The least number of workers with which the job continues. Replicated."""
        return self.worker_slots.least

    @property
    def most(self) -> int:
        """The largest number of workers now possible, including processes on standby or to be spawned. Replicated."""
        return len(self.members) + sum(len(worker_slots) for worker_slots in self._available())

    def _available(self) -> list[range]:
        """Return the worker slots of each process that could join: processes on standby first, then spawned ones."""
        taken = {slot for p in (*self._transport.group.everyone, *self._standby) for slot in p.worker_slots}
        k, vacant = len(self.workers), [slot for slot in range(self.capacity) if slot not in taken]
        blocks = [
            range(worker_slots[0], worker_slots[0] + k) for worker_slots in zip(*[iter(vacant)] * k, strict=False)
        ]
        whole = [block for block in blocks if set(block) <= set(vacant)]
        return [*(process.worker_slots for process in self._standby), *(whole if self.spawns else [])]

    def nearest(self, workers: int) -> int:
        """Return the number of workers nearest to `workers` that whole processes can provide. Replicated."""
        return min(self._possible_numbers(), key=lambda number: (abs(number - workers), number))

    def _possible_numbers(self) -> list[int]:
        numbers, total = [], 0
        for worker_slots in (*(process.worker_slots for process in self._working()), *self._available()):
            total += len(worker_slots)
            if total >= self.least:
                numbers.append(total)
        return numbers or [total]

    def _working(self) -> list[Process]:
        working = [process for process in self._transport.group.everyone if self._works(process)]
        return sorted(working, key=_first_worker_slot)

    def _works(self, process: Process) -> bool:
        return process.worker_slots[0] in self.members

    def _continue_with(self, survivors: ProcessGroup, lost: Mapping[int, Process], how: tuple[str, float]) -> None:
        """Continue with the survivors of a loss. Raises WorkerError if too few workers are left."""
        self._set_group(survivors)
        self._standby = [process for process in self._standby if process not in lost.values()]
        self._set_members(*_without(self.worker_slots, self.losses, lost, how))

    def _set_members(self, worker_slots: WorkerSlots, losses: tuple[Loss, ...]) -> None:
        new = losses[len(self.losses) :]
        self.worker_slots, self.losses, self.generation = worker_slots, losses, worker_slots.generation
        left = len(self.members)
        if new and left < self.least:
            self._transport.lifetime.closed = True
            what = f"{left} worker{' is' if left == 1 else 's are'} left, and min_workers={self.least}: all stop."
            raise WorkerError("\n    ".join([what, *map(str, new)]))

    # --- asking for more workers --------------------------------------------------------------------------------------

    def request_workers(self, workers: int) -> None:
        """Start to prepare processes so that there can be `workers` members: see `World.request_workers`."""
        self._requested = workers
        self._asked, self._ready = set(), set()

    def poll_ready(self) -> int:
        """Return how many of the requested workers are ready to join; 0 on ranks other than 0.

        Receives control messages, asks processes on standby to get ready, and spawns processes if these do not suffice.
        """
        missing = self._requested - len(self.members)
        if self._transport.rank or missing <= 0:
            return 0
        self._receive()
        ranks = self._standby_ranks()
        # A dead process counts as ready, because all processes detect its death at the rendezvous.
        self._ready |= self._messages.dead(ranks) & self._asked
        self._ask(ranks, missing)
        there = sum(len(self._job.everyone[rank].worker_slots) for rank in self._ready)
        return there + self._spawn(missing - sum(len(process.worker_slots) for process in self._standby))

    def poll_reserve_terminating(self) -> bool:
        """Return whether a process on standby received a termination signal and the job cannot continue without it;
        False on ranks other than 0. Receives control messages.
        """
        if self._standby and not (self._transport.survives or self._transport.rank):
            self._receive()
        return self._standby_terminated

    def _receive(self) -> None:
        """Receive control messages of processes on standby."""
        while (message := self._messages.receive()) is not None:
            if message[0] == READY:
                self._ready.add(message[2])
            elif message[0] == TERMINATED:
                self._standby_terminated = True

    def _ask(self, ranks: Sequence[int], missing: int) -> None:
        """Ask processes on standby to get ready, until as many workers were asked as are missing."""
        for rank in ranks:
            if sum(len(self._job.everyone[asked].worker_slots) for asked in self._asked) >= missing:
                return
            if rank not in self._asked:
                self._asked.add(rank)
                self._messages.send([rank], ASK)

    def _spawn(self, missing: int) -> int:
        """Spawn processes for the missing workers, and return how many spawned workers are ready."""
        for worker_slots in self._available()[len(self._standby) :]:
            if missing <= 0 or self.spawner.failed:
                break
            missing -= len(worker_slots)
            if not self.spawner.has(worker_slots):
                hosts = {process.node: process.host for process in self._job.everyone}
                self.spawner.spawn(SpawnRequest(worker_slots, self.capacity, self.members, hosts))
        return sum(len(spawned.worker_slots) for spawned in self.spawner.ready(self._build_digests()))

    # --- changes of members -------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Separate the working processes from those on standby, for a run. Called by all processes."""
        if (self._standby or self.spawns) and not self.run_under_way:
            self._regroup("the beginning of a run", lambda: self.members)

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Change the number of members: see `World.change`.

        Raises:
          Preempted: this process leaves for good; the others continue.
        """
        self.begin_run()
        for_good = [process for process in self._working() if process.worker_slots[0] in leaving]

        def staying() -> tuple[int, ...]:
            worker_slots: list[int] = []
            for process in self._working():
                if process not in for_good and len(worker_slots) + len(process.worker_slots) <= workers:
                    worker_slots.extend(process.worker_slots)
            return tuple(worker_slots) or self.members  # if no other process is left, the terminated ones stay

        if len(staying()) < len(self.members):
            self._regroup("a change of members", staying, for_good)
        if self.in_reserve and self.workers[0] in leaving:
            raise self._leave_job("it received a termination signal, and the others continue")
        if len(self.members) < workers:
            self._rendezvous(JOIN, workers)

    def _regroup(self, about: str, staying: Callable[[], tuple[int, ...]], for_good: Sequence[Process] = ()) -> None:
        """Continue with the workers on the slots that `staying` returns; other processes go on standby, or leave."""
        regroup = Regroup(self._mpi, about, lambda: self.workers[0] in staying())
        self._transport.run(regroup)
        worker_slots, before = staying(), self._transport.group
        working = [process for process in before.everyone if process.worker_slots[0] in worker_slots]
        for slot in self.members:
            if slot not in worker_slots:
                self.worker_slots.leave(slot)
        self.generation = self.worker_slots.generation
        new = [p for p in before.everyone if p not in working and p not in self._standby and p not in for_good]
        self._standby = sorted([*self._standby, *new], key=_first_worker_slot)
        self._separate(ProcessGroup(regroup.result, tuple(working)))
        if not self.in_reserve and self._transport.rank == 0:
            ranks = [self._job.everyone.index(process) for process in working]
            self._messages.send(self._standby_ranks(), MEMBERS, ranks)

    def _separate(self, working: ProcessGroup) -> None:
        """Become a working process of the group, or go on standby if this process is not in it."""
        self.run_under_way = True
        self.in_reserve = self.workers[0] not in self.members
        if self.in_reserve:
            self._transport.rank = len(working.everyone) + 1  # differs from all working processes' ranks
            self._working_ranks = [self._job.everyone.index(process) for process in working.everyone]
        else:
            self._set_group(working)
        self._transport.completed = 0
        self.request_workers(len(self.members))

    # --- rendezvous ---------------------------------------------------------------------------------------------------

    def end_run(self) -> None:
        """Bring all processes together after a run. Called by all workers; processes on standby stop waiting."""
        if self.run_under_way:
            self._rendezvous(END_RUN, len(self.members))

    def dismiss(self) -> None:
        """Release the processes on standby, at the end of the world."""
        if self.run_under_way and not self.in_reserve:
            self.spawner.dismiss()
            self._rendezvous(TERMINATE if self._transport.lifetime.terminated else CLOSE, len(self.members))

    def report_failure(self, why: str) -> None:
        """Send the processes on standby the error with which the job ends."""
        if self.run_under_way and not self.in_reserve:
            self._messages.send(self._standby_ranks(), FAILED, why)

    def _standby_ranks(self) -> list[int]:
        return [self._job.everyone.index(process) for process in self._standby]

    def _rendezvous(self, purpose: str, workers: int) -> str:
        """Meet all processes of the job. Working processes give the purpose; processes on standby receive it.

        Returns:
          The purpose.
        """
        transport, was_on_standby = self._transport, self.in_reserve
        own = next(p for p in self._job.everyone if p.worker_slots == self.workers)
        rank, ready = NO_RANK if was_on_standby else transport.rank, was_on_standby and self._is_ready()
        role = Attendee(own, rank, ready, world_number=transport.world_number)
        spawned: list[SpawnedProcess] = []
        if not was_on_standby:
            # Working processes first complete their earlier operations, so that none is late at the rendezvous.
            transport.run(FinalOperation(f"a rendezvous of all processes, to {purpose}", "", RENDEZVOUS))
            if purpose == JOIN and transport.rank == 0:
                spawned = self.spawner.ready(self._build_digests())[: max(0, workers - len(self.members))]
            role = role._replace(rank=transport.rank, spawned=len(spawned))
            self._messages.send(self._standby_ranks(), MEET)
        with transport.collective():
            transport.watch_over(self._job)
            transport.mark_begun(Operation("a rendezvous of all processes", "", RENDEZVOUS))
            plan, job, comm, world_number = rendezvous(
                *(self._mpi, self._job, role, partial(self._plan, purpose, workers)),
                survives=transport.survives,
                spawned=spawned,
                entry=self._entry,
            )
        self.spawner.admitted(spawned)
        if self._entry is not None:
            ending.joined()
            self._entry = None
        self._job = job
        transport.world_number = world_number
        self._messages = ControlMessages(self._mpi, self._job.comm)
        if plan is None:
            transport.lifetime.closed = True
            raise WorkerError(f"this process was on standby, and {WORKERS_LOST}")
        self._follow(plan, comm)
        self._has_state = not (was_on_standby and not self.in_reserve)
        return plan.purpose

    def _follow(self, plan: RendezvousPlan, comm: Any) -> None:
        """Carry out the plan of a rendezvous."""
        working = ProcessGroup(comm, tuple(self._job.everyone[rank] for rank in plan.ranks))
        self._set_members(plan.worker_slots, plan.losses)
        self._standby = [process for process in self._job.everyone if not self._works(process)]
        self._separate(working)
        if plan.purpose == END_RUN:
            self.in_reserve = self.run_under_way = False
            self._set_group(working)
        self.needs_state_transfer = plan.purpose in (JOIN, END_RUN)

    def _plan(self, purpose: str, workers: int, job: ProcessGroup, roles: Sequence[Attendee]) -> RendezvousPlan:
        """Return the members and tasks that follow from a rendezvous. Has no side effects."""
        unseen = {r: p for r, p in self._transport.group.lost_in(job).items() if self._works(p)}
        worker_slots, losses = _without(self.worker_slots, self.losses, unseen, ("a rendezvous of all processes", 0.0))
        ranks = sorted((r for r, role in enumerate(roles) if role.rank != NO_RANK), key=lambda r: roles[r].rank)
        others = [r for r, role in enumerate(roles) if role.rank == NO_RANK]
        if purpose == END_RUN:
            ranks += others
        if purpose == JOIN:
            for rank in others:
                process = job.everyone[rank]
                if roles[rank].ready and len(worker_slots.members) + len(process.worker_slots) <= workers:
                    ranks.append(rank)
                    for slot in process.worker_slots:
                        worker_slots.join(slot)
        return RendezvousPlan(purpose, tuple(ranks), worker_slots, losses)

    def transfer_state(
        self, make: Callable[[], TransferPayload], room: Callable[[], list[np.ndarray]], about: str = ""
    ) -> TransferPayload | None:
        """Transfer the run's state to joining processes: see `World.transfer_state`."""
        transfer = StateTransfer(about, make, room, has_state=self._has_state)
        self._transport.run(transfer)
        self.needs_state_transfer, self._has_state = False, True
        return transfer.result

    # --- on standby ---------------------------------------------------------------------------------------------------

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait on standby until this process joins the workers, or the run is over.

        Args:
          is_ready: returns whether this process could join now.

        Raises:
          WorkerError: the job ends with an error.
          ReserveReleased: the workers have left the world's `with` block.
          Preempted: all processes, or only this one, received a termination signal.
        """
        self._is_ready = is_ready
        while self.in_reserve:
            loop = StandbyLoop(self._messages, self._working_ranks, self._build_digests())
            word, content = loop.next(is_ready, self._has_to_terminate)
            if self._pair is not None and word != TERMINATED:
                self._answer(word, content)
                self._entry, self._pair = (self._pair, content), None
            if word in (FAILED, ALL_LOST):
                self._transport.lifetime.closed = True
                what = WORKERS_LOST if word == ALL_LOST else f"the workers have stopped: {content}"
                raise WorkerError(f"this process was on standby, and {what}")
            if word == TERMINATED and self._transport.survives:
                raise self._leave_job("it was on standby, and received a termination signal")
            if word == TERMINATED:
                self._termination_sent = True
                self._messages.send([self._working_ranks[0]], TERMINATED)
                continue
            purpose = self._rendezvous("", 0)
            if purpose in (CLOSE, TERMINATE):
                self._transport.lifetime.closed = True
                acknowledge_termination()
                raise ReserveReleased if purpose == CLOSE else Preempted("all workers received a termination signal")

    def await_admission(self, pair: Any, members: Sequence[int]) -> None:
        """Start on standby as a spawned process. `pair`: the communicator with the process that spawned it."""
        self.run_under_way = self.in_reserve = True
        self._transport.rank = len(members) + 1
        self._pair, self._working_ranks = pair, [0]
        self._messages = ControlMessages(self._mpi, pair)

    def _has_to_terminate(self) -> bool:
        """Return whether this process received a termination signal at least `TERMINATION_SECONDS` ago. Until then, the
        workers may report that all processes received it.
        """
        heard = pending_termination()
        return not self._termination_sent and heard is not None and heard.seconds > TERMINATION_SECONDS

    def _leave_job(self, why: str) -> Preempted:
        """Leave the job for good, while the others continue. Returns the error to raise."""
        acknowledge_termination()
        self._abandon()
        with suppress(SystemExit):
            ending.leave_job()
        return Preempted(why, alone=True)

    def _answer(self, word: str, content: Any) -> None:
        """End this spawned process, because it is not admitted."""
        if word == REFUSED:
            _log.error("this spawned process is not admitted: %s.", content)
        if word != MEET:
            self._transport.lifetime.closed = True
            ending.leave_job()


def slots_at_start(
    there: int, workers: int | None = None, min_workers: int = 1, max_workers: int | None = None
) -> WorkerSlots:
    """Return the worker slots of a job that is started with `there` of them. For the arguments see `MPIWorld`.

    Raises:
      WorkerCountError: a number of workers is not possible.
    """
    first = there if workers is None else number_of_workers(workers, there)
    most = there
    if max_workers is not None:
        most = number_of_workers(max_workers, MOST_WORKERS, least=there, name="max_workers")
    return WorkerSlots(most, first, min_workers)


def _first_worker_slot(process: Process) -> int:
    return process.worker_slots[0]


def _without(
    worker_slots: WorkerSlots, losses: tuple[Loss, ...], lost: Mapping[int, Process], how: tuple[str, float]
) -> tuple[WorkerSlots, tuple[Loss, ...]]:
    """Return worker slots and losses, updated for newly lost processes. Has no side effects."""
    worker_slots = deepcopy(worker_slots)
    new = [Loss(tuple(process.worker_slots), f"rank {rank} ({process})", *how) for rank, process in lost.items()]
    for loss in new:
        for slot in loss.workers:
            if slot in worker_slots.members:
                worker_slots.empty(slot)
    return worker_slots, (*losses, *new)
