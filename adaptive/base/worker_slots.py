"""Worker slots: which of a world's slots are occupied.

A program is traced, laid out and compiled for all slots of its world, its *capacity*. Which of them are occupied is a
run-time matter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from .errors import WorkerCountError
from .numbers import brief, whole
from .world import Loss, TransferPayload


class FixedMembership:
    """Mixin for worlds whose processes never change. Replicated."""

    losses: tuple[Loss, ...] = ()
    unowned_slots: tuple[int, ...] = ()
    survives = False
    waited = hang_timeout = 0.0
    in_reserve = run_under_way = needs_state_transfer = spawns = False
    build_digests: Mapping[str, str] = MappingProxyType({})
    deterministic = False

    @property
    def members(self) -> tuple[int, ...]:
        """The occupied worker slots, in order."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The current number of workers."""
        return len(self.members)

    def poll_reserve_terminating(self) -> bool:
        """No process is in reserve."""
        return False

    def algorithm(self, channel: Hashable) -> str:
        """Return "": there is only one algorithm."""
        return ""

    def begin_run(self) -> None:
        """Begin a run; there is no reserve."""

    def end_run(self) -> None:
        """End a run; there is no reserve."""

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """No process is in reserve."""

    def transfer_state(
        self, make: Callable[[], TransferPayload], room: Callable[[], list[np.ndarray]], about: str = ""
    ) -> TransferPayload | None:
        """All know what there is to know."""


class WorkerSlots(FixedMembership):
    """What worlds of one process, whose workers come and go, say of them. Replicated.

    Whoever is not there is in reserve, and can be had at once: nothing has to be started.

    Args:
      capacity: how many worker slots there are.
      workers: how many of them are taken at first, from the lowest on; all by default.
      min_workers: fewer there cannot be.

    Raises:
      WorkerCountError: `workers` is no number from `min_workers` to `capacity`.
    """

    respawn = False

    def __init__(self, capacity: int, workers: int | None = None, min_workers: int = 1):
        self._least = number_of_workers(min_workers, capacity, name="min_workers")
        taken = capacity if workers is None else number_of_workers(workers, capacity, least=self._least)
        self.capacity = capacity
        self._joined_in: list[int | None] = [0] * taken + [None] * (capacity - taken)
        self._gone: set[int] = set()  # empty worker slots whose workers have left for good
        self._called = taken
        self.generation = 0
        self._members: tuple[int, tuple[int, ...]] = (-1, ())  # as of a generation

    @property
    def members(self) -> tuple[int, ...]:
        """The occupied worker slots."""
        if self._members[0] != self.generation:
            members = tuple(worker_slot for worker_slot, since in enumerate(self._joined_in) if since is not None)
            self._members = (self.generation, members)
        return self._members[1]

    @property
    def joined_in_generation(self) -> tuple[int, ...]:
        """For each member, the generation in which it joined; differs between successive workers of a slot."""
        return tuple(since for since in self._joined_in if since is not None)

    # --- by hand ------------------------------------------------------------------------------------------------------

    def leave(self, worker_slot: int) -> None:
        """Remove the worker of a slot.

        Raises:
          ValueError: there is no such slot, it is empty, or its worker is the last one.
        """
        if self._at(worker_slot) is None:
            raise ValueError(f"worker slot {worker_slot} is already empty.")
        if len(self.members) == 1:
            raise ValueError(f"the worker in slot {worker_slot} is the last one; at least one must remain.")
        self.empty(worker_slot)

    def empty(self, worker_slot: int) -> None:
        """Remove the worker of an occupied slot, even the last one."""
        self._joined_in[worker_slot] = None
        self.generation += 1

    def join(self, worker_slot: int) -> None:
        """Add a new worker in an empty slot.

        Raises:
          ValueError: there is no such slot, or it is occupied.
        """
        if self._at(worker_slot) is not None:
            raise ValueError(f"worker slot {worker_slot} is occupied; a worker joins in an empty one.")
        self._joined_in[worker_slot] = self.generation + 1
        self.generation += 1
        self._gone.discard(worker_slot)

    def _at(self, worker_slot: int) -> int | None:
        if not 0 <= worker_slot < len(self._joined_in):
            raise ValueError(f"there is no worker slot {worker_slot}; slots are 0 … {len(self._joined_in) - 1}.")
        return self._joined_in[worker_slot]

    # --- the protocol of World ----------------------------------------------------------------------------------------

    @property
    def least(self) -> int:
        """The minimum number of workers."""
        return self._least

    @property
    def most(self) -> int:
        """The maximum number of workers: the slots without those whose workers have left for good."""
        return len(self._joined_in) - len(self._gone)

    def poll_ready(self) -> int:
        """The number of requested workers that are ready to join: all of them."""
        return max(0, min(self._called, self.most) - len(self.members))

    def nearest(self, workers: int) -> int:
        """Return the available number of workers nearest to a requested one: the protocol of `World`."""
        return min(max(workers, self.least), self.most)

    def request_workers(self, workers: int) -> None:
        """Set the requested number of workers: the protocol of `World`."""
        self._called = workers

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Change the number of members: the protocol of `World`.

        Raises:
          WorkerCountError: the number is not available, or a leaving slot is empty.
        """
        for worker_slot in leaving:
            if self._at(worker_slot) is None:
                raise WorkerCountError(f"worker slot {worker_slot} is already empty.")
        stay = [worker_slot for worker_slot in self.members if worker_slot not in leaving]
        gone = self._gone | set(leaving)
        free = [
            worker_slot
            for worker_slot, since in enumerate(self._joined_in)
            if since is None and worker_slot not in gone
        ]
        if not 1 <= workers <= len(stay) + len(free):
            raise WorkerCountError(f"{workers} workers are not available: {len(stay)} stay, and {len(free)} can join.")
        joining = free[: max(0, workers - len(stay))]
        if not (leaving or joining or workers < len(stay)):
            return
        self._gone = gone
        for worker_slot in (*leaving, *stay[workers:]):
            self._joined_in[worker_slot] = None
        for worker_slot in joining:
            self._joined_in[worker_slot] = self.generation + 1
        self.generation += 1


def number_of_workers(value: Any, most: int, *, least: int = 1, name: str = "workers") -> int:
    """Return a user's number of workers as an integer between two bounds.

    Args:
      name: of the argument, for errors.

    Raises:
      WorkerCountError: it isn't an integer, or is out of bounds.
    """
    number = whole(value)
    if number is None:
        raise WorkerCountError(f"{name}= must be a whole number of workers; got {value!r}.")
    if number < 1:
        raise WorkerCountError(f"{name}={brief(number)}: there must be at least one worker.")
    if not least <= number <= most:
        there = f"{least} to {most} are" if least < most else f"{most} is"
        raise WorkerCountError(f"{name}={brief(number)} is not available: {there}.")
    return number
