"""Who is there: workers sit on seats, and a seat may be empty.

A program is traced, laid out and compiled for all seats of its world: its *capacity*. Who sits on them is a run-time
matter.
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
    """What worlds say whose processes are all there, from beginning to end. Replicated."""

    losses: tuple[Loss, ...] = ()
    unowned_slots: tuple[int, ...] = ()
    survives = False
    waited = hang_timeout = 0.0
    in_reserve = run_under_way = needs_state_transfer = spawns = False
    build_digests: Mapping[str, str] = MappingProxyType({})
    deterministic = False

    @property
    def members(self) -> tuple[int, ...]:
        """The seats with a worker on them, in order."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """The number of members: how many workers there are now."""
        return len(self.members)

    def poll_reserve_terminating(self) -> bool:
        """No process is in reserve."""
        return False

    def algorithm(self, channel: Hashable) -> str:
        """There is one way for all messages, and nothing to say about it."""
        return ""

    def begin_run(self) -> None:
        """A run begins: no process waits for it in reserve."""

    def end_run(self) -> None:
        """A run is over: no process has waited for it."""

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """No process is in reserve."""

    def transfer_state(
        self, make: Callable[[], TransferPayload], room: Callable[[], list[np.ndarray]], about: str = ""
    ) -> TransferPayload | None:
        """All know what there is to know."""


class Seats(FixedMembership):
    """What worlds of one process, whose workers come and go, say of them. Replicated.

    Whoever is not there is in reserve, and can be had at once: nothing has to be started.

    Args:
      capacity: how many seats there are.
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
        self._gone: set[int] = set()  # empty seats whose workers have left for good
        self._called = taken
        self.generation = 0
        self._members: tuple[int, tuple[int, ...]] = (-1, ())  # as of a generation

    @property
    def members(self) -> tuple[int, ...]:
        """The seats that are taken."""
        if self._members[0] != self.generation:
            members = tuple(seat for seat, since in enumerate(self._joined_in) if since is not None)
            self._members = (self.generation, members)
        return self._members[1]

    @property
    def joined_in_generation(self) -> tuple[int, ...]:
        """For each member, the generation in which it came. No two members of a seat have the same."""
        return tuple(since for since in self._joined_in if since is not None)

    # --- by hand ------------------------------------------------------------------------------------------------------

    def leave(self, seat: int) -> None:
        """Empty a seat.

        Raises:
          ValueError: there is no such seat, nobody sits there, or nobody else is left.
        """
        if self._at(seat) is None:
            raise ValueError(f"seat {seat} is empty already: who leaves must be there.")
        if len(self.members) == 1:
            raise ValueError(f"the worker on seat {seat} is the last one: somebody has to stay.")
        self.empty(seat)

    def empty(self, seat: int) -> None:
        """As `leave`, of a seat that is taken; also of the last one: then there is nobody."""
        self._joined_in[seat] = None
        self.generation += 1

    def join(self, seat: int) -> None:
        """Fill an empty seat, with a new worker: nothing is known of it.

        Raises:
          ValueError: there is no such seat, or it is taken.
        """
        if self._at(seat) is not None:
            raise ValueError(f"seat {seat} is taken: who joins needs an empty one.")
        self._joined_in[seat] = self.generation + 1
        self.generation += 1
        self._gone.discard(seat)

    def _at(self, seat: int) -> int | None:
        if not 0 <= seat < len(self._joined_in):
            raise ValueError(f"there is no seat {seat}; seats are 0 … {len(self._joined_in) - 1}.")
        return self._joined_in[seat]

    # --- as a program asks --------------------------------------------------------------------------------------------

    @property
    def least(self) -> int:
        """How many workers there have to be."""
        return self._least

    @property
    def most(self) -> int:
        """How many workers there can be: on all seats but those whose workers have left for good."""
        return len(self._joined_in) - len(self._gone)

    def poll_ready(self) -> int:
        """How many of those who were called in are ready to join: all of them."""
        return max(0, min(self._called, self.most) - len(self.members))

    def nearest(self, workers: int) -> int:
        """The number of workers that can be had, nearest to one that is asked for: the protocol of `World`."""
        return min(max(workers, self.least), self.most)

    def request_workers(self, workers: int) -> None:
        """Say how many workers there are to be: the protocol of `World`."""
        self._called = workers

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Come to a number of members: the protocol of `World`."""
        for seat in leaving:
            if self._at(seat) is None:
                raise WorkerCountError(f"seat {seat} is empty already: who leaves must be there.")
        stay = [seat for seat in self.members if seat not in leaving]
        gone = self._gone | set(leaving)
        free = [seat for seat, since in enumerate(self._joined_in) if since is None and seat not in gone]
        if not 1 <= workers <= len(stay) + len(free):
            raise WorkerCountError(f"there cannot be {workers} workers: {len(stay)} stay, and {len(free)} can join.")
        joining = free[: max(0, workers - len(stay))]
        if not (leaving or joining or workers < len(stay)):
            return
        self._gone = gone
        for seat in (*leaving, *stay[workers:]):
            self._joined_in[seat] = None
        for seat in joining:
            self._joined_in[seat] = self.generation + 1
        self.generation += 1


def number_of_workers(value: Any, most: int, *, least: int = 1, name: str = "workers") -> int:
    """A number of workers as a user gives it: whole, and between two bounds.

    Args:
      name: of the argument, for errors.

    Raises:
      WorkerCountError: it is not.
    """
    number = whole(value)
    if number is None:
        raise WorkerCountError(f"{name}= is a whole number of workers; got {value!r}.")
    if number < 1:
        raise WorkerCountError(f"{name}={brief(number)}: there has to be a worker, one at least.")
    if not least <= number <= most:
        there = f"{least} to {most}" if least < most else f"{most}"
        raise WorkerCountError(f"{name}={brief(number)} cannot be had: there can be {there}.")
    return number
