"""Worker slots: which of a world's slots are occupied, which may change while programs run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import WorkerCountError
from .values.numbers import whole


class WorkerSlots:
    """Members of a world of one process whose workers can leave and join; a mixin for `World`. Replicated. Workers of
    empty slots are in reserve, and join at once.

    Args:
      workers: number of workers at the start, in the lowest slots; by default `capacity`.
      min_workers: smallest number of workers.

    Raises:
      WorkerCountError: `workers` is not a number from `min_workers` to `capacity`.
    """

    respawn = False

    def __init__(self, capacity: int, workers: int | None = None, min_workers: int = 1):
        self._least = number_of_workers(min_workers, capacity, name="min_workers")
        first = capacity if workers is None else number_of_workers(workers, capacity, least=self._least)
        self.capacity = capacity
        self._joined_in: list[int | None] = [0] * first + [None] * (capacity - first)  # generations; None: empty slot
        self._gone: set[int] = set()  # empty slots whose workers have left for good
        self._requested = first
        self.generation = 0
        self._members: tuple[int, tuple[int, ...]] = (-1, ())  # as of a generation

    @property
    def members(self) -> tuple[int, ...]:
        """The occupied worker slots."""
        if self._members[0] != self.generation:
            members = tuple(slot for slot, since in enumerate(self._joined_in) if since is not None)
            self._members = (self.generation, members)
        return self._members[1]

    @property
    def joined_in_generation(self) -> tuple[int, ...]:
        """For each member, the generation in which it joined; differs between successive workers of a slot."""
        return tuple(since for since in self._joined_in if since is not None)

    # --- called by users ----------------------------------------------------------------------------------------------

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

    # --- see `World` --------------------------------------------------------------------------------------------------

    @property
    def least(self) -> int:
        """The minimum number of workers."""
        return self._least

    @property
    def most(self) -> int:
        """The maximum number of workers: slots whose workers have not left for good."""
        return len(self._joined_in) - len(self._gone)

    def poll_ready(self) -> int:
        """Return the number of requested workers that are ready to join, which is all of them."""
        return max(0, min(self._requested, self.most) - len(self.members))

    def nearest(self, workers: int) -> int:
        """Return the available number of workers nearest to a requested one: see `World`."""
        return min(max(workers, self.least), self.most)

    def request_workers(self, workers: int) -> None:
        """Set the requested number of workers: see `World`."""
        self._requested = workers

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Change the number of members: see `World`.

        Raises:
          WorkerCountError: the number is not available, or a leaving slot is empty.
        """
        for slot in leaving:
            if self._at(slot) is None:
                raise WorkerCountError(f"worker slot {slot} is already empty.")
        stay = [slot for slot in self.members if slot not in leaving]
        gone = self._gone | set(leaving)
        free = [slot for slot, since in enumerate(self._joined_in) if since is None and slot not in gone]
        if not 1 <= workers <= len(stay) + len(free):
            raise WorkerCountError(f"{workers} workers are not available: {len(stay)} stay, and {len(free)} can join.")
        joining = free[: max(0, workers - len(stay))]
        if not (leaving or joining or workers < len(stay)):
            return
        self._gone = gone
        for slot in (*leaving, *stay[workers:]):
            self._joined_in[slot] = None
        for slot in joining:
            self._joined_in[slot] = self.generation + 1
        self.generation += 1


def number_of_workers(value: Any, most: int, *, least: int = 1, name: str = "workers") -> int:
    """Return a user's number of workers, argument `name`, as an integer. Raises a WorkerCountError if it isn't one
    between the bounds.
    """
    number = whole(value)
    if number is None:
        raise WorkerCountError(f"{name}= must be a whole number of workers; got {value!r}.")
    if number < 1:
        raise WorkerCountError(f"{name}={number!r}: there must be at least one worker.")
    if not least <= number <= most:
        there = f"{least} to {most} are" if least < most else f"{most} is"
        raise WorkerCountError(f"{name}={number!r} is not available: {there}.")
    return number
