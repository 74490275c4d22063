"""Who works and who is in reserve, of a job's processes: an `MPIWorld`'s, and how that changes."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from adaptive import Preempted, ReserveReleased, WorkerCountError, WorkerError
from adaptive.extend import (
    Loss,
    Seats,
    TransferPayload,
    acknowledge_termination,
    number_of_workers,
    pending_termination,
)
from collectives.worlds.transport.operations import MEETING, FinalOperation, Operation, Regroup, StateTransfer
from collectives.worlds.transport.process_group import Process, ProcessGroup
from launchers import ending

from .rendezvous import ALL_GO, CLOSE, JOIN, NOBODY, TOGETHER, Attendee, RendezvousPlan, rendezvous
from .spawning import SpawnedProcess, Spawner, SpawnRequest, as_process
from .standby import ASK, FAILED, MEET, MEMBERS, READY, REFUSED, TOLD, ControlMessages, StandbyLoop

MOST = 1 << 20  # workers
TOLD_SECONDS = 0.3  # that a process in reserve stays when it is told to go

_log = logging.getLogger("adaptive")


class ElasticProcesses:
    """Of a world of several processes, which come and go as wholes.

    A job's processes are *together* when a world is made, and when a run is over: whatever they do then, all do. In a
    run they are apart: the workers are together, and whoever is in reserve waits.

    Attributes:
      respawn: whether workers that are lost, or told to go, are replaced. Replicated.
      spawns: whether processes may be spawned. Replicated.
      build_digests: digests of what this process has built, by which recruits are compared.
      in_reserve: whether this process waits, or should. Local.
      run_under_way: whether there are others in reserve, or this process is. Replicated.
      needs_state_transfer: whether processes have come in that know nothing yet of what the others do. Replicated.
      survives: whether the others go on when processes are lost, or leave for good. Replicated.
    """

    respawn = False
    spawns = False
    build_digests: Mapping[str, str] = MappingProxyType({})
    in_reserve = False
    apart = False
    needs_state_transfer = False
    generation = 0
    losses: tuple[Loss, ...] = ()
    _closed: bool
    _mpi: Any
    _seats: Seats
    survives: bool
    _all_go: bool
    _abandon: Callable[[str], None]
    _make_sure: Callable[[], None]
    _together: ProcessGroup
    _completed: int
    _operation: Operation
    _inside: bool
    _begun: int
    workers: range
    rank: int
    capacity: int

    def _start_staff(
        self, everyone: ProcessGroup, workers: int | None, min_workers: int, max_workers: int | None
    ) -> None:
        """The processes that a job was started with."""
        there = everyone.everyone[-1].seats.stop
        first = there if workers is None else number_of_workers(workers, there)
        most = there if max_workers is None else number_of_workers(max_workers, MOST, least=there, name="max_workers")
        self._staff(everyone, Seats(most, first, min_workers), most)
        if workers is not None and self.nearest(workers) != workers:
            raise WorkerCountError(
                f"workers={workers} cannot be had: whole processes take part. The nearest is {self.nearest(workers)}."
            )

    def _start_recruit(self, alone: ProcessGroup, pair: Any, offer: SpawnRequest, min_workers: int) -> ProcessGroup:
        """A process that was spawned: it is in reserve, and known to whoever has spawned it."""
        alone = ProcessGroup(alone.comm, (as_process(offer, platform.node()),))
        seats = Seats(offer.capacity, None, min_workers)
        for seat in range(offer.capacity):
            if seat not in offer.members:
                seats.leave(seat)
        self._staff(alone, seats, offer.capacity)
        self.run_under_way = self.in_reserve = True
        self.rank, self._pair = len(offer.members) + 1, pair
        self._words, self._members_now = ControlMessages(self._mpi, pair), [0]
        return alone

    def _staff(self, everyone: ProcessGroup, seats: Seats, capacity: int) -> None:
        self.capacity, self._seats = capacity, seats
        # Not the workers' own, which is revoked where one of them is lost: in that nobody is told anything any more.
        whole = everyone.comm.Dup()
        whole.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._job = ProcessGroup(whole, everyone.everyone)
        self.workers = everyone.everyone[everyone.comm.rank].seats
        self._recruiting = Spawner(self._mpi)
        self._words = ControlMessages(self._mpi, whole)
        self._idle: list[Process] = [p for p in everyone.everyone if not self._works(p)]  # in reserve; replicated
        self._knows = True  # what the others do
        self._called = len(self.members)
        self._asked: set[int] = set()  # ranks in the job that were asked to get ready; known to rank 0
        self._ready: set[int] = set()
        self._take(everyone)

    # What the world does.

    def _do(self, operation: Operation) -> None:
        raise NotImplementedError

    def _collective(self) -> Any:
        raise NotImplementedError

    def _watch_over(self, those: ProcessGroup) -> None:
        raise NotImplementedError

    def _take(self, together: ProcessGroup) -> None:
        raise NotImplementedError

    # --- who is there -------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The seats with a worker on them."""
        return self._seats.members

    @property
    def joined_in_generation(self) -> tuple[int, ...]:
        """For each member the generation in which it came."""
        return self._seats.joined_in_generation

    @property
    def least(self) -> int:
        """How many workers there have to be."""
        return self._seats.least

    @property
    def most(self) -> int:
        """How many workers there can be now: the members, and those in reserve."""
        return len(self.members) + sum(len(seats) for seats in self._to_come())

    def _to_come(self) -> list[range]:
        """Of each process that could come in, the seats: of those in reserve, and of those that can be spawned."""
        taken = {seat for p in (*self._together.everyone, *self._idle) for seat in p.seats}
        k, vacant = len(self.workers), [seat for seat in range(self.capacity) if seat not in taken]
        blocks = [range(seats[0], seats[0] + k) for seats in zip(*[iter(vacant)] * k, strict=False)]
        whole = [block for block in blocks if set(block) <= set(vacant)]
        return [*(process.seats for process in self._idle), *(whole if self.spawns else [])]

    def nearest(self, workers: int) -> int:
        """The number of workers that can be had, of whole processes, nearest to one that is asked for."""
        return min(self._numbers(), key=lambda number: (abs(number - workers), number))

    def _numbers(self) -> list[int]:
        """How many workers there can be, in order."""
        numbers, total = [], 0
        for seats in (*(process.seats for process in self._working()), *self._to_come()):
            total += len(seats)
            if total >= self.least:
                numbers.append(total)
        return numbers or [total]

    def _working(self) -> list[Process]:
        working = [process for process in self._together.everyone if self._works(process)]
        return sorted(working, key=_by_seat)

    def _works(self, process: Process) -> bool:
        return process.seats[0] in self.members

    def _lose(self, gone: Mapping[int, Process], how: tuple[str, float]) -> None:
        """These processes are lost: by the ranks that they had.

        Raises:
          WorkerError: too few are left.
        """
        self._idle = [process for process in self._idle if process not in gone.values()]
        self._be(*_without(self._seats, self.losses, gone, how))

    def _be(self, seats: Seats, losses: tuple[Loss, ...]) -> None:
        """Who is there now, and who was lost so far."""
        new = losses[len(self.losses) :]
        self._seats, self.losses, self.generation = seats, losses, seats.generation
        left = len(self.members)
        if new and left < self.least:
            self._closed = True
            what = f"{left} worker{' is' if left == 1 else 's are'} left, and min_workers={self.least}: all stop."
            raise WorkerError("\n    ".join([what, *map(str, new)]))

    # --- asking for more ----------------------------------------------------------------------------------------------

    def request_workers(self, workers: int) -> None:
        """Begin to get so many ready that there can be `workers` members: the protocol of `World`."""
        self._called = workers
        self._asked, self._ready = set(), set()

    @property
    def ready(self) -> int:
        """How many of those who were called in are ready to join; known to the process with rank 0."""
        missing = self._called - len(self.members)
        if self.rank or missing <= 0:
            return 0
        self._listen()
        ranks = [self._job.everyone.index(process) for process in self._idle]
        # Whoever has died counts, too: at the meeting all will know of it.
        self._ready |= self._words.dead(ranks) & self._asked
        self._ask(ranks, missing)
        there = sum(len(self._job.everyone[rank].seats) for rank in self._ready)
        return there + self._spawned(missing - sum(len(process.seats) for process in self._idle))

    @property
    def reserve_terminating(self) -> bool:
        """Whether a process in reserve was told to go, and the job cannot go on without it; known to rank 0."""
        if self._idle and not (self.survives or self.rank):
            self._listen()
        return self._reserve_told

    _reserve_told = False

    def _listen(self) -> None:
        """To those in reserve."""
        while (heard := self._words.heard()) is not None:
            if heard[0] == READY:
                self._ready.add(heard[2])
            elif heard[0] == TOLD:
                self._reserve_told = True

    def _ask(self, ranks: Sequence[int], missing: int) -> None:
        """Have as many get ready as are missing."""
        for rank in ranks:
            if sum(len(self._job.everyone[asked].seats) for asked in self._asked) >= missing:
                return
            if rank not in self._asked:
                self._asked.add(rank)
                self._words.send([rank], ASK)

    def _spawned(self, missing: int) -> int:
        """How many workers that are not even in reserve are ready. Has as many come as are missing."""
        for seats in self._to_come()[len(self._idle) :]:
            if missing <= 0 or self._recruiting.failed:
                break
            missing -= len(seats)
            if not self._recruiting.has(seats):
                hosts = {process.node: process.host for process in self._job.everyone}
                self._recruiting.spawn(SpawnRequest(seats, self.capacity, self.members, hosts))
        return sum(len(recruit.seats) for recruit in self._recruiting.ready(self.build_digests))

    # --- change -------------------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """A run begins: from here on those in reserve wait. All processes come here."""
        if (self._idle or self.spawns) and not self.run_under_way:
            self._regroup("the beginning of a run", lambda: self.members)

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Come to a number of members: the protocol of `World`."""
        self.begin_run()
        for_good = [process for process in self._working() if process.seats[0] in leaving]

        def stay() -> tuple[int, ...]:
            seats: list[int] = []
            for process in self._working():
                if process not in for_good and len(seats) + len(process.seats) <= workers:
                    seats.extend(process.seats)
            return tuple(seats) or self.members  # where nobody else is left, those who were told to go stay

        if len(stay()) < len(self.members):
            self._regroup("a change of members", stay, for_good)
        if self.in_reserve and self.workers[0] in leaving:
            raise self._gone("it was told to go, and the others go on")
        if len(self.members) < workers:
            self._meet(JOIN, workers)

    def _regroup(self, about: str, stay: Callable[[], tuple[int, ...]], for_good: Sequence[Process] = ()) -> None:
        """Of those who are together only the workers on these seats go on."""
        regroup = Regroup(self._mpi, about, lambda: self.workers[0] in stay())
        with self._collective():
            self._do(regroup)
        seats, before = stay(), self._together
        there = [process for process in before.everyone if process.seats[0] in seats]
        for seat in self.members:
            if seat not in seats:
                self._seats.leave(seat)
        self.generation = self._seats.generation
        self._idle += [p for p in before.everyone if p not in there and p not in self._idle and p not in for_good]
        self._idle = sorted(self._idle, key=_by_seat)
        self._go_apart(ProcessGroup(regroup.result, tuple(there)))
        if not self.in_reserve and self.rank == 0:
            self._words.send(self._ranks_in_reserve(), MEMBERS, [self._job.everyone.index(p) for p in there])

    def _go_apart(self, together: ProcessGroup) -> None:
        """Be one of these, or in reserve."""
        self.run_under_way = True
        self.in_reserve = self.workers[0] not in self.members
        if self.in_reserve:
            self.rank = len(together.everyone) + 1  # of no worker, and not the first
            self._members_now = [self._job.everyone.index(process) for process in together.everyone]
        else:
            self._take(together)
        self._completed = 0
        self.request_workers(len(self.members))

    _members_now: Sequence[int] = ()  # ranks in the job, as far as this process knows

    # --- meetings of all ----------------------------------------------------------------------------------------------

    def end_run(self) -> None:
        """A run is over: from here on all processes are together. Those in reserve come out of their waiting."""
        if self.run_under_way:
            self._meet(TOGETHER, len(self.members))

    def _dismiss_reserve(self) -> None:
        if self.run_under_way and not self.in_reserve:
            self._recruiting.dismiss()
            self._meet(ALL_GO if self._all_go else CLOSE, len(self.members))

    def _tell_reserve(self, why: str) -> None:
        if self.run_under_way and not self.in_reserve:
            self._words.send(self._ranks_in_reserve(), FAILED, why)

    def _ranks_in_reserve(self) -> list[int]:
        return [self._job.everyone.index(process) for process in self._idle]

    def _meet(self, purpose: str, workers: int) -> str:
        """Come to a meeting: the workers, of one mind about what it is for, or a process in reserve, which is told.

        Returns:
          What it was for.
        """
        was_idle = self.in_reserve
        own = next(p for p in self._job.everyone if p.seats == self.workers)
        role = Attendee(own, NOBODY if was_idle else self.rank, was_idle and self._is_ready())
        recruits: list[SpawnedProcess] = []
        if not was_idle:
            # Nobody waits at the meeting for one who is still to complete what the workers did before it.
            with self._collective():
                self._do(FinalOperation(f"a meeting of all processes, to {purpose}", "", MEETING))
            if purpose == JOIN and self.rank == 0:
                recruits = self._recruiting.ready(self.build_digests)[: max(0, workers - len(self.members))]
            role = role._replace(rank=self.rank, recruits=len(recruits))
            self._words.send(self._ranks_in_reserve(), MEET)
        with self._collective():
            self._watch_over(self._job)
            self._operation, self._inside = Operation("a meeting of all processes", "", MEETING), True
            self._begun += 1
            plan = partial(self._planned, purpose, workers)
            outcome = rendezvous(
                *(self._mpi, self._job, role, plan), survives=self.survives, recruits=recruits, pair=self._entry
            )
        if self._job.gone(outcome.job):
            self._make_sure()
        self._recruiting.let_in(recruits)
        if self._entry is not None:
            ending.joined()
            self._entry = None
        self._job = outcome.job
        self._words = ControlMessages(self._mpi, self._job.comm)
        if outcome.plan is None:
            self._closed = True
            raise WorkerError("all workers are lost, and with them the state of the run.")
        found = outcome.plan
        there = ProcessGroup(outcome.comm, tuple(self._job.everyone[rank] for rank in found.together))
        self._be(found.seats, found.losses)
        self._idle = [process for process in self._job.everyone if not self._works(process)]
        self._go_apart(there)
        if found.purpose == TOGETHER:
            self.in_reserve = self.run_under_way = False
            self._take(there)
        self.needs_state_transfer = found.purpose in (JOIN, TOGETHER)
        self._knows = not (was_idle and not self.in_reserve)
        return found.purpose

    def _planned(self, purpose: str, workers: int, job: ProcessGroup, roles: Sequence[Attendee]) -> RendezvousPlan:
        """What is to be after a meeting. Changes nothing here."""
        unseen = {r: p for r, p in self._together.gone(job).items() if self._works(p)}
        seats, losses = _without(self._seats, self.losses, unseen, ("a meeting of all processes", 0.0))
        there = sorted((r for r, role in enumerate(roles) if role.rank != NOBODY), key=lambda r: roles[r].rank)
        others = [r for r, role in enumerate(roles) if role.rank == NOBODY]
        if purpose == TOGETHER:
            there += others
        if purpose == JOIN:
            for rank in others:
                process = job.everyone[rank]
                if roles[rank].ready and len(seats.members) + len(process.seats) <= workers:
                    there.append(rank)
                    for seat in process.seats:
                        seats.join(seat)
        return RendezvousPlan(purpose, tuple(there), seats, losses)

    # --- in reserve ---------------------------------------------------------------------------------------------------

    _is_ready: Callable[[], bool] = staticmethod(lambda: True)

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait in reserve: until this process is one of the workers, or all are together again (`apart` is false).

        Args:
          is_ready: whether it could join now.

        Raises:
          WorkerError: the job ends with an error.
          ReserveReleased: the workers have left the world's block.
          Preempted: they have, since all were told to go; or this process was, and nobody needs it.
        """
        self._is_ready = is_ready
        while self.in_reserve:
            waiting = StandbyLoop(self._words, self._members_now, self.build_digests)
            word, content = waiting.next(is_ready, self._is_told)
            if self._pair is not None and word != TOLD:
                self._answer(word, content)
                self._entry, self._pair = (self._pair, content), None
            if word == FAILED:
                self._closed = True
                raise WorkerError(f"the workers, for whom this process was in reserve, have stopped: {content}")
            if word == TOLD and self.survives:
                raise self._gone("it was in reserve, and was told to go")
            if word == TOLD:
                self._said_told = True
                self._words.send([self._members_now[0]], TOLD)
                continue
            purpose = self._meet("", 0)
            if purpose in (CLOSE, ALL_GO):
                self._closed = True
                acknowledge_termination()
                raise ReserveReleased if purpose == CLOSE else Preempted("all workers received a termination signal")

    _said_told = False

    def _is_told(self) -> bool:
        """Whether this process, in reserve, was told to go, some moments ago: where all were told, the workers may be
        about to say so.
        """
        heard = pending_termination()
        return not self._said_told and heard is not None and heard.seconds > TOLD_SECONDS

    def _gone(self, why: str) -> Preempted:
        """This process goes for good, and the others do not miss it."""
        acknowledge_termination()
        self._abandon("")
        with suppress(SystemExit):
            ending.leave_job()
        return Preempted(why, alone=True)

    _pair: Any = None  # of a recruit that is not let in yet: the communicator with whoever has spawned it
    _entry: Any = None  # that, and where it is let in

    def _answer(self, word: str, content: Any) -> None:
        """Of a recruit: end, unless it is let in."""
        if word == REFUSED:
            _log.error("this process was spawned, and is not let in: %s.", content)
        if word != MEET:
            self._closed = True
            ending.leave_job()

    def transfer_state(
        self, make: Callable[[], TransferPayload], room: Callable[[], list[np.ndarray]], about: str = ""
    ) -> TransferPayload | None:
        """What newcomers have to know, from processes that do: for them, and `None` for the others."""
        operation = StateTransfer(about, make, room, knows=self._knows)
        with self._collective():
            self._do(operation)
        self.needs_state_transfer, self._knows = False, True
        return operation.result


def _by_seat(process: Process) -> int:
    return process.seats[0]


def _without(
    seats: Seats, losses: tuple[Loss, ...], gone: Mapping[int, Process], how: tuple[str, float]
) -> tuple[Seats, tuple[Loss, ...]]:
    """Seats and losses when these processes are lost too. Changes nothing."""
    seats = deepcopy(seats)
    new = [Loss(tuple(process.seats), f"rank {rank} ({process})", *how) for rank, process in gone.items()]
    for loss in new:
        for seat in loss.workers:
            if seat in seats.members:
                seats.empty(seat)
    return seats, (*losses, *new)
