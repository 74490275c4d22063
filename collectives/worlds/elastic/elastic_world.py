"""Elastic jobs: which processes work and which are on standby, and the changes between the two during a run.

Control messages, spawning and the rendezvous have files of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, NoReturn

import numpy as np

from adaptive import Preempted, ReserveReleased, WorkerCountError, WorkerError
from adaptive.base.process.signals import acknowledge_termination, pending_termination
from adaptive.base.worker_slots import WorkerSlots, number_of_workers
from adaptive.base.world import Loss, TransferPayload
from collectives.worlds.base import forward
from collectives.worlds.multi_process import MultiProcessWorld
from collectives.worlds.transport.mpi_transport import MPITransport
from collectives.worlds.transport.operations import RENDEZVOUS, Operation, StateTransfer
from collectives.worlds.transport.process_group import Process, ProcessGroup
from launchers import ending

from . import standby
from .rendezvous import (
    CHANGE,
    CLOSE,
    END_RUN,
    NO_RANK,
    TERMINATE,
    Attendee,
    RendezvousPlan,
    plan_members,
    rendezvous,
)
from .spawning import SpawnedProcess, Spawner, SpawnRequest
from .standby import WORKERS_LOST, ControlMessages

MOST_WORKERS = 1 << 20
TERMINATION_SECONDS = 0.3  # time from a termination signal until a process on standby acts on it


class ElasticWorld(MultiProcessWorld):
    """A world whose processes, each with its workers, leave and join.

    Some processes work; the others are on standby. All workers of a process join or leave together. Between two runs,
    all processes perform operations together. During a run, only the working processes do, and those on standby wait
    for control messages (`standby.py`). All processes meet at a `rendezvous` when members change, and after the run.

    Args:
      hang_timeout, respawn: see `MPIWorld`.
      spawns: whether processes may be spawned.
    """

    transport: MPITransport  # runs the operations of the working processes

    def __init__(self, hang_timeout: float | None, *, respawn: bool, spawns: bool):
        super().__init__(hang_timeout)
        self.respawn, self.spawns = respawn, spawns
        self._has_state = True  # of the run
        self._working_ranks: set[int] = set()  # in the job, as far as this process on standby knows
        self._ready: dict[int, bool] = {}  # of the ranks in the job that were asked to get ready; rank 0 knows
        self._pair: Any = None  # of a spawned process, until it is admitted: its communicator with the one that spawned

    def set_processes(
        self, transport: MPITransport, everyone: ProcessGroup, worker_slots: WorkerSlots, workers: int | None = None
    ) -> None:
        """Set the processes of the job, and the transport of those that work; called once, by all of them. Raises
        WorkerCountError if whole processes cannot provide `workers` at the start.
        """
        self.transport, self._mpi = transport, transport.mpi
        self.worker_slots, self.capacity = worker_slots, worker_slots.capacity
        # The workers' communicator cannot be used: it is revoked when a worker is lost.
        whole = everyone.comm.Dup()
        whole.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._job = ProcessGroup(whole, everyone.everyone)
        self._own = everyone.everyone[everyone.comm.rank]
        self.workers = self._own.worker_slots
        self._messages = ControlMessages(self._mpi, whole)
        self._standby = [process for process in everyone.everyone if not self._works(process)]  # replicated
        self.spawner = Spawner(self._mpi)
        transport.on_lost = self._continue_with
        self._set_group(everyone)
        self.request_workers(len(self.members))
        if workers is not None and self.nearest(workers) != workers:
            raise WorkerCountError(
                f"workers={workers} is not possible: all workers of a process work, or none. The nearest possible "
                f"number is {self.nearest(workers)}."
            )

    def await_admission(self, pair: Any, world_number: int) -> None:
        """Start on standby, as a process that was spawned by the one in `pair`."""
        self.run_under_way = self.in_reserve = True
        self.transport.rank = len(self.members) + 1  # differs from all working processes' ranks
        self.transport.world_number = world_number
        self._pair, self._working_ranks = pair, {0}
        self._messages = ControlMessages(self._mpi, pair)

    def _set_group(self, group: ProcessGroup) -> None:
        self.transport.set_group(group)
        carried = {slot for process in group.everyone for slot in process.worker_slots}
        self.unowned_slots = tuple(slot for slot in range(self.capacity) if slot not in carried)

    # --- which processes there are: see `World` -----------------------------------------------------------------------

    survives: bool = forward("transport.survives")
    everyone: tuple[Process, ...] = forward("transport.group.everyone")
    generation: int = forward("worker_slots.generation")
    members: tuple[int, ...] = forward("worker_slots.members")
    joined_in_generation: tuple[int, ...] = forward("worker_slots.joined_in_generation")
    least: int = forward("worker_slots.least")

    @property
    def most(self) -> int:
        """The largest number of workers now possible, including processes on standby or to be spawned. Replicated."""
        return len(self.members) + sum(map(len, self._available()))

    def nearest(self, workers: int) -> int:
        """Return the number of workers nearest to `workers` that whole processes can provide. Replicated."""
        working = [process.worker_slots for process in self.transport.group.everyone if self._works(process)]
        possible, total = [], 0
        for worker_slots in (*sorted(working, key=min), *self._available()):
            total += len(worker_slots)
            if total >= self.least:
                possible.append(total)
        return min(possible or [total], key=lambda number: (abs(number - workers), number))

    def _available(self) -> list[range]:
        """Return the worker slots of each process that could join: those on standby first, then spawned ones."""
        on_standby = [process.worker_slots for process in self._standby]
        return [*on_standby, *(self._vacant() if self.spawns else [])]

    def _vacant(self) -> list[range]:
        """Return the worker slots of each process that could be spawned."""
        taken = {slot for p in (*self.transport.group.everyone, *self._standby) for slot in p.worker_slots}
        k = len(self._job.everyone[0].worker_slots)
        blocks = [range(first, first + k) for first in range(0, self.capacity - k + 1, k)]
        return [block for block in blocks if taken.isdisjoint(block)]

    def _works(self, process: Process) -> bool:
        return process.worker_slots[0] in self.members

    def _continue_with(self, survivors: ProcessGroup, lost: Mapping[int, Process], how: tuple[str, float]) -> None:
        """Continue with the survivors of a loss. Raises WorkerError if too few workers are left."""
        self._set_group(survivors)
        self._standby = [process for process in self._standby if process not in lost.values()]
        self._set_members(*_without(self.worker_slots, self.losses, lost, how))

    def _set_members(self, worker_slots: WorkerSlots, losses: tuple[Loss, ...]) -> None:
        new = losses[len(self.losses) :]
        self.worker_slots, self.losses = worker_slots, losses
        left = len(self.members)
        if new and not left:
            self._end_standby(WORKERS_LOST)
        if new and left < self.least:
            self.lifetime.closed = True
            what = f"{left} worker{' is' if left == 1 else 's are'} left, and min_workers={self.least}: all stop."
            raise WorkerError("\n    ".join([what, *map(str, new)]))

    # --- asking for more workers --------------------------------------------------------------------------------------

    def request_workers(self, workers: int) -> None:
        """Start to prepare processes so that there can be `workers` members: see `World.request_workers`."""
        self._requested, self._ready = workers, {}

    def poll_ready(self) -> int:
        """Return how many of the requested workers are ready to join; 0 on ranks other than 0.

        Receives control messages, asks processes on standby to get ready, and spawns processes if these do not suffice.
        """
        missing = self._requested - len(self.members)
        if self.transport.rank or missing <= 0:
            return 0
        while (message := self._messages.receive()) is not None:
            if message[0] == standby.READY:
                self._ready[message[2]] = True
        dead, there = self._messages.dead(self._ready), 0
        for rank, process in zip(self._standby_ranks(), self._standby, strict=True):
            if missing <= 0:
                return there
            if rank not in self._ready:
                self._ready[rank] = False
                self._messages.send([rank], standby.ASK)
            missing -= len(process.worker_slots)
            # A dead process counts as ready, because all processes detect its death at the rendezvous.
            there += len(process.worker_slots) * (self._ready[rank] or rank in dead)
        for worker_slots in self._vacant() if self.spawns else []:
            if missing <= 0 or self.spawner.failed:
                break
            missing -= len(worker_slots)
            if not self.spawner.has(worker_slots):
                hosts = {process.node: process.host for process in self._job.everyone}
                slots = deepcopy(self.worker_slots)
                self.spawner.spawn(SpawnRequest(worker_slots, slots, hosts, self.transport.world_number))
        return there + sum(len(spawned.worker_slots) for spawned in self.spawner.ready(self.build_digests))

    # --- changes of members -------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Separate the working processes from those on standby, for a run. Called by all processes."""
        if (self._standby or self.spawns) and not self.run_under_way:
            self._rendezvous(CHANGE, len(self.members))

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Change the number of members: see `World.change`.

        Raises:
          Preempted: this process leaves for good; the others continue.
        """
        self.begin_run()
        if leaving or workers != len(self.members):
            self._rendezvous(CHANGE, workers, leaving)
        if self.in_reserve and self.workers[0] in leaving:
            raise self._leave_job("it received a termination signal, and the others continue")

    def end_run(self) -> None:
        """Bring all processes together after a run. Called by all workers; processes on standby stop waiting."""
        if self.run_under_way:
            self._rendezvous(END_RUN)

    def transfer_state(
        self, make: Callable[[], TransferPayload], room: Callable[[], list[np.ndarray]], about: str = ""
    ) -> TransferPayload | None:
        """Transfer the run's state to joining processes: see `World.transfer_state`."""
        transfer = StateTransfer(about, make, room, has_state=self._has_state)
        self.transport.run(transfer)
        self.needs_state_transfer, self._has_state = False, True
        return transfer.result

    def _standby_ranks(self) -> list[int]:
        return [self._job.everyone.index(process) for process in self._standby]

    def _rendezvous(
        self,
        purpose: str,
        workers: int = 0,
        leaving: Sequence[int] = (),
        *,
        entry: Any = None,
        ready: bool = False,
    ) -> str:
        """Meet all processes of the job, and return the purpose, which working processes give, as `workers`, the new
        number, and `leaving`, the slots whose workers leave for good. On standby, `entry` is the content of the `MEET`
        message, and `ready` whether this process can join.
        """
        transport, spawned = self.transport, list[SpawnedProcess]()
        if self.in_reserve:
            role = Attendee(self._own, NO_RANK, ready)
        else:
            # Working processes first complete their earlier operations, so that none is late at the rendezvous.
            transport.run(Operation(f"a rendezvous of all processes, to {purpose}", "", RENDEZVOUS, is_final=True))
            if purpose == CHANGE and transport.rank == 0:
                missing = workers - len(self.members)
                spawned = self.spawner.ready(self.build_digests)[: max(0, missing)]
            role = Attendee(self._own, transport.rank, False, len(spawned))
            if self.run_under_way:
                self._messages.send(self._standby_ranks(), standby.MEET)

        def plan(job: ProcessGroup, roles: Sequence[Attendee]) -> RendezvousPlan:
            unseen = {r: p for r, p in transport.group.lost_in(job).items() if self._works(p)}
            how = ("a rendezvous of all processes", 0.0)
            left = _without(self.worker_slots, self.losses, unseen, how)
            return plan_members(purpose, *left, roles, workers=workers, leaving=leaving)

        transport.watch_over(self._job)
        with transport.collective(Operation("a rendezvous of all processes", "", RENDEZVOUS)):
            found, job, comm = rendezvous(
                *(self._mpi, self._job, role, plan),
                survives=self.survives,
                spawned=spawned,
                entry=None if self._pair is None else (self._pair, entry),
            )
        self.spawner.admitted(spawned)
        if self._pair is not None:
            ending.report(joined=True)
            self._pair = None
        self._job, self._messages = job, ControlMessages(self._mpi, job.comm)
        if found is None:
            self._end_standby(WORKERS_LOST)
        self._follow(found, comm, leaving)
        self._has_state = role.rank != NO_RANK or self.in_reserve
        return found.purpose

    def _follow(self, plan: RendezvousPlan, comm: Any, leaving: Sequence[int]) -> None:
        """Carry out the plan of a rendezvous: become a working process, or go on standby."""
        everyone = self._job.everyone
        self._set_members(plan.worker_slots, plan.losses)
        self._standby = sorted(
            (p for p in everyone if not self._works(p) and p.worker_slots[0] not in leaving),
            key=lambda process: process.worker_slots[0],
        )
        self.run_under_way = plan.purpose != END_RUN
        self.in_reserve = self.run_under_way and not self._works(self._own)
        self._working_ranks = set(plan.ranks)
        if self.in_reserve:
            self.transport.rank = len(plan.ranks) + 1  # differs from all working processes' ranks
        else:
            self._set_group(ProcessGroup(comm, tuple(everyone[rank] for rank in plan.ranks)))
        self.transport.completed = 0
        self.needs_state_transfer = plan.sends_state
        self.request_workers(len(self.members))

    # --- on standby ---------------------------------------------------------------------------------------------------

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait on standby until this process joins the workers, or the run is over: see `World.wait`.

        Raises:
          WorkerError: the job ends with an error.
          ReserveReleased: the workers have left the world's `with` block.
          Preempted: all processes, or only this one, received a termination signal.
        """
        while self.in_reserve:
            content = self._stand_by(is_ready)
            purpose = self._rendezvous("", entry=content, ready=is_ready())
            if purpose in (CLOSE, TERMINATE):
                self.lifetime.closed = True
                acknowledge_termination()
                raise ReserveReleased if purpose == CLOSE else Preempted("all workers received a termination signal")

    def _stand_by(self, is_ready: Callable[[], bool]) -> Any:
        """Wait for the `MEET` message, and return its content. Raises as `wait` does."""
        asked, alert_until, checked = None, 0.0, time.monotonic()
        while True:
            message = self._messages.receive()
            word, content, sender = message or ("", None, None)
            if word == standby.MEET:
                return content
            if word in (standby.FAILED, standby.DISMISSED):
                self._end_standby(f"the workers have stopped: {content}")
            if word == standby.ASK:
                asked = sender
            if asked is not None and is_ready():
                self._messages.send([asked], standby.READY, dict(self.build_digests))
                asked, alert_until = None, time.monotonic() + 5
            if message is not None:
                continue
            heard = pending_termination()
            if self.survives and heard is not None and heard.seconds > TERMINATION_SECONDS:  # alone, or all are told
                raise self._leave_job("it was on standby, and received a termination signal")
            now = time.monotonic()
            time.sleep(standby.ALERT_SECONDS if now < alert_until else standby.IDLE_SECONDS)
            if now > checked + standby.SECONDS_BETWEEN_CHECKS:
                checked = now
                if self._messages.dead(self._working_ranks) == self._working_ranks:
                    self._end_standby(WORKERS_LOST)

    def _end_standby(self, why: str) -> NoReturn:
        self.lifetime.closed = True
        if self._pair is not None:
            ending.leave_job()
        if why == WORKERS_LOST:
            ending.report(left=True)  # the ends of the others decide the job's exit code
        raise WorkerError(f"this process was on standby, and {why}")

    def _leave_job(self, why: str) -> Preempted:
        """Leave the job for good. Returns the error to raise."""
        acknowledge_termination()
        self._abandon("")
        with suppress(SystemExit):
            ending.leave_job()
        return Preempted(why, alone=True)

    # --- the end ------------------------------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Make all other processes raise WorkerError, in their current or next operation."""
        if self.in_reserve:
            return  # a process on standby: the workers do not depend on it
        if self.run_under_way:
            self._messages.send(self._standby_ranks(), standby.FAILED, why)
        super().fail(why)

    def dismiss_reserve(self) -> None:
        """Release the processes on standby, at the end of the world."""
        if self.run_under_way and not self.in_reserve:
            self.spawner.dismiss()
            self._rendezvous(TERMINATE if self.lifetime.terminated else CLOSE)


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
