"""Membership: the number of workers of a program, from a request to the steps between which it changes.

    request    `Hooks` or `Program.rescale` passes on a requested number. It is clipped to what is available
               (`World.nearest`) and becomes the *target*; missing workers are requested from the world, in the
               background.
    status     In every step each process reports how many of those are ready to join, and whether it must leave
               (`status.py`).
    change     Between two steps, on all processes alike: workers that must leave leave; missing ones join once all of
               them are ready.

The world carries out leaving and joining; batches, hooks and states follow (`BatchSizes.change_members`,
`Hooks.change_members`, `WorkerState.change_members`). Programs and simulated clusters both use this class.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.errors import BatchSizeError, WorkerCountError
from adaptive.base.process.signals import TerminationNotice
from adaptive.base.process.source_lines import name_workers
from adaptive.base.revision import Revision
from adaptive.base.roster import Roster, with_same_members
from adaptive.base.worker_slots import number_of_workers
from adaptive.base.world import World

from .requests import hooks_in_words

TOGETHER_SECONDS = 0.2  # a scheduler that signals all processes does so within this time


class LeaveRequest(IntEnum):
    """Whether a process must leave."""

    NONE = 0
    SOON = 1  # received a termination signal a moment ago
    NOW = 2


class Numbers(NamedTuple):
    """The target number of workers and its bounds."""

    target: int
    least: int
    most: int


class Leaver(NamedTuple):
    """A process that leaves for good."""

    workers: tuple[int, ...]  # their worker slots
    signal: str  # the name of the termination signal that it received
    process: str  # "pid 4711 on node7"

    def __str__(self) -> str:
        return f"{name_workers(self.workers)} ({self.signal} to {self.process})"


class Membership:
    """The target number of a world's members. Replicated, but for `ready_to_join` and `leave_request`.

    Args:
      in_status: whether the program sends messages, whose status carries the reports. If not, processes exchange them
        in a message of their own: how many workers are ready, while any are missing; and whether they must leave,
        between any two steps.
      termination: returns this process's pending termination signal (`adaptive/base/process/signals.py`).
      fixed_by: why batch sizes, and so the number of workers, never change, and what to change; "" if they do.
      needed: worker slots whose workers must stay, because the driver needs their values.
      roster: the members at first; by default the current ones.
      revision: incremented when the target changes, and when a process reports that it must leave.
    """

    # What a joining process takes over from the others.
    TRANSFERRED = ("_asked", "_there", "_generation", "_ready_elsewhere", "_leave_requests", "_leave_requested")

    def __init__(
        self,
        world: World,
        *,
        in_status: bool = True,
        fixed_by: str = "",
        needed: Sequence[int] = (),
        termination: Callable[[], TerminationNotice | None] = lambda: None,
        roster: Roster | None = None,
        revision: Revision | None = None,
    ):
        self._world, self._in_status, self._fixed_by, self._needed = world, in_status, fixed_by, needed
        self._termination, self._revision = termination, revision or Revision()
        self._asked: int | None = None
        self._forget_reports(roster)

    # --- target -------------------------------------------------------------------------------------------------------

    @property
    def asked(self) -> int | None:
        """The number of members requested last, less those lost since; `None` without a request: then the target is the
        current number.
        """
        return self._asked

    @asked.setter
    def asked(self, number: int | None) -> None:
        self._asked = number
        self._revision.increment()

    @property
    def target(self) -> int:
        """The target number of members."""
        return self._there if self.asked is None else self.asked

    @property
    def pending(self) -> bool:
        """Whether the target differs from the current number of members."""
        return self.target != len(self._world.members)

    @property
    def numbers(self) -> Numbers:
        """The target and its bounds."""
        return Numbers(self.target, self._least, self._world.most)

    @property
    def _least(self) -> int:
        """The lower bound: the highest slots leave first, so all up to the last needed one stay."""
        least = self._world.least
        if self._needed:
            least = max(least, sum(slot <= max(self._needed) for slot in self._world.members))
        return min(least, self._world.most)

    def nearest(self, workers: int) -> int:
        """Return the available target nearest to a requested number."""
        return self._world.nearest(max(workers, self._least))

    def expected(self, workers: int) -> tuple[int, ...]:
        """Return the slots that will be occupied by that many workers."""
        there = self._world.members
        occupied = set(there)
        free = [slot for slot in range(self._world.capacity) if slot not in occupied]
        return tuple(sorted((*there, *free[: max(0, workers - len(there))])[:workers]))

    # --- request ------------------------------------------------------------------------------------------------------

    def request(self, workers: int, hooks: Sequence[str] = ()) -> list[str]:
        """Set the target; return a note if it was clipped or rounded; `hooks`: those that asked for it. Raises a
        BatchSizeError if batch sizes are fixed, and so the number of workers.
        """
        number = self.nearest(workers)
        who = hooks_in_words(hooks)
        if self._fixed_by and number != len(self._world.members):
            raise BatchSizeError(
                f"{who} asked for {workers!r} workers, but this program's batch sizes are fixed: {self._fixed_by}"
            )
        self.asked = number
        self._world.request_workers(number)
        if number == workers:
            return []
        why = "the most available" if number == self._world.most else "the fewest allowed"
        how = f"clipped to {number}, {why}" if workers > self._world.most or workers < self._least else ""
        return [f"{who}: workers {workers!r} {how or f'rounded to {number}, for whole processes'}."]

    def exactly(self, workers: Any) -> int:
        """Return a requested number of workers. Raises a WorkerCountError if it isn't available as it is."""
        number = number_of_workers(workers, self._world.most, least=self._least)
        nearest = self.nearest(number)
        if nearest != number:
            raise WorkerCountError(
                f"workers={number} is not possible: only whole processes join and leave. The nearest is {nearest}."
            )
        return number

    # --- leaving upon a termination signal ----------------------------------------------------------------------------

    @property
    def leave_request(self) -> LeaveRequest:
        """Whether this process must leave. Local.

        A scheduler that signals all processes does not reach them at the same instant. So a signaled process reports
        `SOON`, and waits a moment for the others; once one reports `NOW`, all that reported either leave.
        """
        notice = self._termination()
        if notice is None:
            return LeaveRequest.NONE
        late = self._world.processes == 1 or notice.seconds >= TOGETHER_SECONDS
        return LeaveRequest.NOW if late else LeaveRequest.SOON

    @property
    def leaving(self) -> tuple[int, ...]:
        """The slots whose workers leave for good before the next step, upon a termination signal."""
        alone, n = self._world.processes == 1, self._world.capacity
        if not (self.leave_request if alone else self._leave_requested):
            return ()  # in nearly all steps
        requests = [self.leave_request] * n if alone else self._leave_requests.tolist()
        members = {slot: requests[slot] for slot in self._world.members}
        if LeaveRequest.NOW not in members.values():
            return ()
        return tuple(slot for slot, asks in members.items() if asks >= LeaveRequest.SOON)

    @property
    def why_all_leave(self) -> str:
        """Why termination signals end the run: all workers received one, or the others cannot continue; "" if not."""
        leaving, there = self.leaving, self._world.members
        left = len(there) - len(leaving)
        who = f"{name_workers(leaving)} received a termination signal"
        if not leaving:
            return ""
        if not left:
            return "all workers received a termination signal"
        if not self._world.survives:
            return f"{who}, and in this job a single process cannot leave"
        if left < self._world.least:
            return f"{who}, and fewer than min_workers={self._world.least} would be left"
        needed = [slot for slot in leaving if slot in self._needed]
        return f"{who}, and the driver needs what {name_workers(needed)} broadcasts" if needed else ""

    def _ask_who_leaves(self, about: str) -> list[Leaver]:
        """Gather all leave requests once one process must leave: includes signals that arrived during the step."""
        world, own, notice = self._world, self._world.workers, self._termination()
        process = f"pid {os.getpid()} on {platform.node()}"
        if world.processes == 1:
            return [Leaver(tuple(own), notice.signal, process)] if notice else []
        if self._in_status and not self.leaving:
            return []
        mine = [self.leave_request, own.start, own.stop, notice.signal if notice else "", process]
        said = self._gathered(mine, f"who leaves {about}")
        requests = np.zeros(world.capacity)
        for wish, start, stop, *_ in said:
            requests[start:stop] = wish
        self._set_leave_requests(requests)
        leaving = self.leaving
        return [Leaver(tuple(range(start, stop)), *who) for _, start, stop, *who in said if start in leaving]

    def _gathered(self, value: Any, about: str) -> list[Any]:
        return [json.loads(text) for text in self._world.all_gather_bytes(json.dumps(value).encode(), about)]

    # --- status -------------------------------------------------------------------------------------------------------

    @property
    def ready_to_join(self) -> int:
        """Number of missing workers that are ready to join, as far as this process knows. Local."""
        return self._world.poll_ready() if self.target > len(self._world.members) else 0

    def on_agreed(self, *, ready_to_join: int, leave_requests: np.ndarray) -> None:
        """Apply what all processes reported in this step, in sum; `leave_requests`: by worker, shape=(capacity,)."""
        self._ready_elsewhere = ready_to_join
        self._set_leave_requests(leave_requests)

    def _set_leave_requests(self, leave_requests: np.ndarray) -> None:
        self._leave_requests, self._leave_requested = leave_requests, bool(leave_requests.any())
        if self._leave_requested:
            self._revision.increment()

    def _forget_reports(self, roster: Roster | None = None) -> None:
        """Continue with these members, by default the current ones, which have reported nothing yet."""
        roster = roster or Roster.of(self._world)
        self._there, self._generation = len(roster.members), roster.generation  # at the last `_refresh`
        self._ready_elsewhere = 0
        self._set_leave_requests(np.zeros(self._world.capacity))

    # --- change -------------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether any worker might leave or join before the next step. Replicated."""
        unheard = not self._in_status and self._world.processes > 1
        return bool(self.pending or self.leaving or unheard) or self._world.generation != self._generation

    def change(self, about: str = "") -> list[Leaver]:
        """Apply all pending leaves and joins between two steps, unless the run ends (`why_all_leave`). Return the
        processes that leave upon a termination signal. May communicate.
        """
        leavers = self._ask_who_leaves(about)
        ready = with_same_members(self._world, lambda: self._refresh_and_count(about))
        leaving, there = self.leaving, len(self._world.members)
        if self.why_all_leave or not (leaving or self.pending):
            return leavers
        missing = max(0, self.target - there)
        stay = there - len(leaving)
        if leaving and self._world.respawn:
            self.asked = self.target
        elif leaving and self.asked is not None:  # a worker that leaves is not replaced
            self.asked = min(self.asked, stay + missing)
        number = self.target
        if number > stay + ready:
            number = stay  # workers join all together or not at all
        if leaving or number != there:
            before = self._world.losses
            self._world.change(number, leaving)
            lost = sum(len(loss.workers) for loss in self._world.losses[len(before) :])
            if lost and self.asked is not None and not self._world.respawn:  # lost while members changed: not replaced
                self.asked = max(len(self._world.members), self.asked - lost)
            self._forget_reports()
            if self.pending:
                self._world.request_workers(self.target)
        return leavers

    def _refresh_and_count(self, about: str) -> int:
        """Update the target, and return the number of missing workers that are ready. May communicate."""
        self._refresh()
        if self.why_all_leave or not (self.leaving or self.pending):
            return 0
        if self.asked is not None:
            self.asked = self.nearest(self.asked)  # processes in reserve may be lost
        if self.target <= len(self._world.members) or self._world.processes == 1:
            return self.ready_to_join
        if self._in_status:
            return self._ready_elsewhere
        return sum(self._gathered(self.ready_to_join, f"workers ready to join {about}"))

    def _refresh(self) -> None:
        """Account for workers that joined or were lost without a request."""
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
        """Restore a target: the requested number, or `None`. If the only request was made after the checkpoint, the
        number of `members` at the checkpoint becomes the target; `roster`: the members when restoring began.
        """
        if asked is None and self.asked is not None:
            asked = members
        self._forget_reports(roster)
        self.asked = None if asked is None else self.nearest(asked)
        self._world.request_workers(self.target)
