"""How many workers there are to be, from a request for another number to the steps between which they change.

    request    `Hooks`, or `Program.rescale`, hands on what was asked for. It is clipped to what can be had
               (`World.nearest`). This is the *target*; those who are missing are called in, beside the steps.
    status     In every step each process says how many of those are ready to join, and whether it wants to leave
               (`status.py`).
    change     Between two steps, on all alike: whoever has to leave leaves; those who are missing join, once all of
               them are ready.

What joining and leaving take is the world's matter; what follows for batches, hooks and states is the program's
(`BatchSizes.seat`, `Hooks.seat`, `Engine.seat`).

A program has such a membership, and so has a simulated cluster.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from adaptive.base.errors import BatchSizeError, WorkerCountError
from adaptive.base.numbers import brief
from adaptive.base.roster import Roster, with_same_members
from adaptive.base.seats import number_of_workers
from adaptive.base.signals import TerminationNotice
from adaptive.base.world import Loss

WANTS, MUST = 1, 2  # to leave: told so a moment ago; and it is time
TOGETHER_SECONDS = 0.2  # within which all are told, where all are


class Recruiting(Protocol):
    """What is needed of a `World`."""

    @property
    def members(self) -> tuple[int, ...]: ...
    @property
    def capacity(self) -> int: ...
    @property
    def joined_in_generation(self) -> tuple[int, ...]: ...
    @property
    def generation(self) -> int: ...
    @property
    def losses(self) -> Sequence[Loss]: ...
    @property
    def workers(self) -> range: ...
    @property
    def processes(self) -> int: ...
    @property
    def survives(self) -> bool: ...
    @property
    def reserve_terminating(self) -> bool: ...
    @property
    def least(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def respawn(self) -> bool: ...
    @property
    def ready(self) -> int: ...

    def nearest(self, workers: int) -> int: ...
    def request_workers(self, workers: int) -> None: ...
    def change(self, workers: int, leaving: Sequence[int] = ()) -> None: ...
    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]: ...


class Numbers(NamedTuple):
    """How many workers there are to be, and can be. Replicated."""

    target: int
    least: int
    most: int


class Leaver(NamedTuple):
    """A process that was told to go, and goes. Replicated."""

    workers: tuple[int, ...]  # their seats
    signal: str  # its name
    process: str  # in words

    def __str__(self) -> str:
        return f"{_workers(self.workers)} ({self.signal} to {self.process})"


class Membership:
    """How many members a program's world is to have. Replicated, but for `newcomers` and `wish`.

    Args:
      tells: whether the program sends messages, on which a status can ride. Without, processes say in a message of its
        own how many are ready, as long as somebody is missing, and between any two steps whether they want to leave.
      termination: what this process was told (`adaptive/base/signals.py`).
      resizable: whether batch sizes change at all; without, the number of workers cannot either.
      needed: seats whose workers must stay, because the driver needs what they have.
      roster: who is there at first; by default who is there now.

    Attributes:
      asked: the number of members that was asked for last, less what has been lost since; `None` if nobody has asked,
        so that there are to be as many as there are.
    """

    def __init__(
        self,
        world: Recruiting,
        *,
        tells: bool = True,
        resizable: bool = True,
        needed: Sequence[int] = (),
        termination: Callable[[], TerminationNotice | None] = lambda: None,
        roster: Roster | None = None,
    ):
        self._world, self._tells, self._resizable, self._needed = world, tells, resizable, needed
        self._termination = termination
        self.asked: int | None = None
        roster = Roster.of(world) if roster is None else roster
        self._there, self._generation = len(roster.members), roster.generation  # as they were last looked at
        self._heard = 0
        self._wishes = np.zeros(world.capacity)

    # --- who is to be there -------------------------------------------------------------------------------------------

    @property
    def target(self) -> int:
        """How many members there are to be."""
        return self._there if self.asked is None else self.asked

    @property
    def pending(self) -> bool:
        """Whether there are to be more or fewer than there are."""
        return self.target != len(self._world.members)

    @property
    def numbers(self) -> Numbers:
        """The target, and between which bounds it could be."""
        return Numbers(self.target, self._least, self._world.most)

    @property
    def _least(self) -> int:
        """How many have to stay: the highest seats leave first, so that all up to the last one that is needed do."""
        least = self._world.least
        if self._needed:
            least = max(least, sum(seat <= max(self._needed) for seat in self._world.members))
        return min(least, self._world.most)

    def nearest(self, workers: int) -> int:
        """The target that can be, nearest to a number that is asked for."""
        return self._world.nearest(max(workers, self._least))

    def expected(self, workers: int) -> tuple[int, ...]:
        """The seats that will be taken when there are so many workers."""
        there = self._world.members
        free = [seat for seat in range(self._world.capacity) if seat not in there]
        return tuple(sorted((*there, *free[: max(0, workers - len(there))])[:workers]))

    # --- request ------------------------------------------------------------------------------------------------------

    def request(self, workers: int, hooks: Sequence[str] = ()) -> list[str]:
        """Make a number of workers the target.

        Args:
          hooks: names of those that have decided.

        Returns:
          A note, where it cannot be had.

        Raises:
          BatchSizeError: the batch sizes stay as they are (`resizable`), so the workers do.
        """
        number = self.nearest(workers)
        who = f"hook {', '.join(map(repr, hooks))}" if hooks else "program.rescale"
        if not self._resizable and number != len(self._world.members):
            raise BatchSizeError(
                f"{who} asked for {brief(workers)} workers, but this program's batch sizes stay as they are: it was "
                "made with resizable=False. Leave that out of ad.Program(...) where workers come and go."
            )
        self.asked = number
        self._world.request_workers(number)
        if number == workers:
            return []
        why = "the most that can be had" if number == self._world.most else "the least that have to stay"
        how = f"clipped to {number}, {why}" if workers > self._world.most or workers < self._least else ""
        return [f"{who}: workers {brief(workers)} {how or f'rounded to {number}, of whole processes'}."]

    def exactly(self, workers: Any) -> int:
        """A number of workers that can be had as it is.

        Raises:
          WorkerCountError: it cannot.
        """
        number = number_of_workers(workers, self._world.most, least=self._least)
        nearest = self.nearest(number)
        if nearest != number:
            raise WorkerCountError(
                f"workers={number} cannot be had: whole processes come and go. The nearest is {nearest}."
            )
        return number

    # --- leaving because told -----------------------------------------------------------------------------------------

    @property
    def wish(self) -> int:
        """Whether this process wants to leave: 0, `WANTS` or `MUST`. Local.

        Where all processes are told, they are not at the same instant. So they say that they want to, and for some
        moments wait for the others; when it is time for one, all who want to leave do.
        """
        told = self._termination()
        if self._world.reserve_terminating:
            return MUST
        if told is None:
            return 0
        return MUST if self._world.processes == 1 or told.seconds >= TOGETHER_SECONDS else WANTS

    @property
    def leaving(self) -> tuple[int, ...]:
        """The seats whose workers leave before the next step, because they were told to go; for good."""
        wishes = [self.wish] * self._world.capacity if self._world.processes == 1 else self._wishes.tolist()
        if MUST not in wishes:
            return ()
        wanted = {seat: wishes[seat] for seat in self._world.members}
        if MUST not in wanted.values():
            return ()
        return tuple(seat for seat, wish in wanted.items() if wish >= WANTS)

    @property
    def why_all_leave(self) -> str:
        """Why the run is to end because of whoever was told to go; "" if it is not. Replicated."""
        leaving, there = self.leaving, self._world.members
        left = len(there) - len(leaving)
        who = f"{_workers(leaving)} {'were' if len(leaving) > 1 else 'was'} told to go"
        if not leaving:
            return ""
        if not left:
            return "all workers were told to go"
        if not self._world.survives:
            return f"{who}, and in this job processes cannot leave alone"
        if left < self._world.least:
            return f"{who}, and fewer than min_workers={self._world.least} would be left"
        needed = [seat for seat in leaving if seat in self._needed]
        return f"{who}, and the driver needs what {_workers(needed)} broadcasts" if needed else ""

    @property
    def all_leave(self) -> bool:
        """Whether the run is to end because of whoever was told to go: all were, or the others cannot go on."""
        return bool(self.why_all_leave)

    def _ask_who_leaves(self, about: str) -> list[Leaver]:
        """Where it is time for somebody, ask all: whoever was told by now, in the course of the step, goes too."""
        world, own, told = self._world, self._world.workers, self._termination()
        process = f"pid {os.getpid()} on {platform.node()}"
        if world.processes == 1:
            return [Leaver(tuple(own), told.signal, process)] if told else []
        if self._tells and not self.leaving:
            return []
        signal = told.signal if told else "said by a process in reserve"
        mine = [self.wish, own.start, own.stop, signal, process]
        said = [json.loads(text) for text in self._gathered(mine, f"who leaves {about}")]
        self._wishes = np.zeros(world.capacity)
        for wish, start, stop, *_ in said:
            self._wishes[start:stop] = wish
        leaving = self.leaving
        return [Leaver(tuple(range(start, stop)), *who) for _, start, stop, *who in said if start in leaving]

    def _gathered(self, value: Any, about: str) -> list[bytes]:
        return self._world.all_gather_bytes(json.dumps(value).encode(), about)

    # --- status -------------------------------------------------------------------------------------------------------

    @property
    def newcomers(self) -> int:
        """How many of those who are missing are ready, as far as this process knows. Local."""
        return self._world.ready if self.target > len(self._world.members) else 0

    def agreed(self, *, newcomers: int, wishes: np.ndarray) -> None:
        """Take what all processes have said in this step.

        Args:
          newcomers: how many are ready to join.
          wishes: each worker's `wish`; shape=(size,).
        """
        self._heard, self._wishes = newcomers, wishes

    def _are_ready(self, about: str) -> int:
        if self._world.processes == 1:
            return self.newcomers
        if self._tells:
            return self._heard
        return sum(map(int, self._gathered(self.newcomers, f"newcomers {about}")))

    # --- change -------------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether anybody might leave or join before the next step. Replicated."""
        unheard = not self._tells and self._world.processes > 1
        return bool(self.pending or self.leaving or unheard) or self._world.generation != self._generation

    def change(self, about: str = "") -> list[Leaver]:
        """Between two steps: let those leave, and those join, who are to. Afterwards the world's members are others, if
        anybody was. May communicate. Where `all_leave`, nobody does: then the run is to end.

        Args:
          about: the step and the program, in words.

        Returns:
          Who leaves because it was told to.

        Raises:
          Preempted: this process has left, for good.
        """
        told = self._ask_who_leaves(about)
        ready = with_same_members(self._world, lambda: self._look_and_ask(about))
        leaving, there = self.leaving, len(self._world.members)
        if self.all_leave or not (leaving or self.pending):
            return told
        missing = max(0, self.target - there)
        stay = there - len(leaving)
        if leaving and self._world.respawn:
            self.asked = self.target
        elif leaving and self.asked is not None:  # whoever leaves is not missed
            self.asked = min(self.asked, stay + missing)
        number = self.target
        if number > stay + ready:
            number = stay  # all of them join at once
        if leaving or number != there:
            before = self._world.losses
            self._world.change(number, leaving)
            self._heard, self._wishes = 0, np.zeros(self._world.capacity)
            lost = sum(len(loss.workers) for loss in self._world.losses[len(before) :])
            if lost and self.asked is not None and not self._world.respawn:  # lost while members changed: not replaced
                self.asked = max(len(self._world.members), self.asked - lost)
            self._there, self._generation = len(self._world.members), self._world.generation
            if self.pending:
                self._world.request_workers(self.target)
        return told

    def _look_and_ask(self, about: str) -> int:
        """Bring the target up to date. Returns how many of those who are missing are ready; may communicate."""
        self._look()
        if self.all_leave or not (self.leaving or self.pending):
            return 0
        if self.asked is not None:
            self.asked = self.nearest(self.asked)  # of those in reserve, some may be gone
        return self._are_ready(about) if self.target > len(self._world.members) else 0

    def _look(self) -> None:
        """Notice who has come, and who was lost, without having been asked."""
        if self._world.generation == self._generation:
            return
        before, now = self._there, len(self._world.members)
        self._there, self._generation = now, self._world.generation
        if self._world.respawn and now < before:
            self.asked = before if self.asked is None else self.asked
            self._world.request_workers(self.asked)
        elif self.asked is not None:
            missing = max(0, self.asked - before)
            if now < before:
                self.asked = min(self.asked, now + missing)
            elif self.asked == before:
                self.asked = now

    def restart(self, asked: int | None, roster: Roster | None = None, *, members: int | None = None) -> None:
        """Go on with a target that was asked for before; `None` if nobody had asked.

        Args:
          roster: who was there when restoring began; by default who is there now.
          members: how many there were. They become the target where nobody had asked then, and somebody has since: that
            request is taken back.
        """
        if asked is None and self.asked is not None:
            asked = members
        roster = Roster.of(self._world) if roster is None else roster
        self._there, self._generation = len(roster.members), roster.generation
        self.asked = None if asked is None else self.nearest(asked)
        self._heard, self._wishes = 0, np.zeros(self._world.capacity)
        self._world.request_workers(self.target)

    def export(self) -> tuple[Any, ...]:
        """Return the replicated part of the state, for `adopt` on a joining process."""
        return self.asked, self._there, self._generation, self._heard, self._wishes

    def adopt(self, exported: tuple[Any, ...]) -> None:
        """Replace the state with what another process has exported."""
        self.asked, self._there, self._generation, self._heard, self._wishes = exported


def _workers(seats: Sequence[int]) -> str:
    return f"worker{'s' * (len(seats) > 1)} {', '.join(map(str, seats))}"
