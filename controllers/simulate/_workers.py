"""Membership of a simulated cluster: workers are lost, come back, and join some steps after a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from adaptive.extend import WorkerSlots


class Workers(WorkerSlots):
    """The worker slots of a cluster on paper, for its `Membership`.

    Args:
      capacity: how many workers there are in all.
      first: how many of them are there at first; the others are in reserve. `None` for all, and no reserve: then
        workers that come back need not be asked for.
      present: `present(step) -> bool, shape=(capacity,)`: which of them can be had.
      join_after: steps from a request to the step before which who was asked for is ready.
      respawn: whether one that is lost is replaced from the reserve.

    Raises:
      WorkerCountError: `first` is no number from 1 to `capacity`.
      ValueError: nobody can be had at first.
    """

    processes = 1

    def __init__(
        self,
        capacity: int,
        *,
        first: int | None = None,
        present: Callable[[int], np.ndarray] | None = None,
        join_after: int = 0,
        respawn: bool = False,
    ):
        super().__init__(capacity, first)
        self.respawn, self.workers = respawn, range(capacity)
        self._present, self._join_after, self._has_reserve = present, join_after, first is not None
        self._step = 0
        self._due: list[int] = []  # before which step each of those who were called in is ready
        gone = self._absent(1)
        if len(gone) == capacity:
            raise ValueError("simulate: the first step has no workers.")
        there = [slot for slot in range(capacity) if slot not in gone][:first]
        self._gone = gone
        self._joined_in = [0 if slot in there else None for slot in range(capacity)]

    def _absent(self, step: int) -> set[int]:
        return set() if self._present is None else set(np.flatnonzero(~np.asarray(self._present(step))).tolist())

    def begin(self, step: int) -> None:
        """Apply the losses and returns before a step.

        Raises:
          ValueError: no worker is left.
        """
        self._step = step
        gone = self._absent(step)
        lost, back = sorted(gone & set(self.members)), sorted(self._gone - gone)
        self._gone = gone
        for slot in [] if self._has_reserve else back:
            self.join(slot)
        for slot in lost:
            if len(self.members) == 1:
                raise ValueError(f"simulate: all workers are lost in step {step}.")
            self.leave(slot)

    def poll_ready(self) -> int:
        """Return how many requested workers are ready to join."""
        return min(super().poll_ready(), sum(due <= self._step for due in self._due))

    def request_workers(self, workers: int) -> None:
        """Request a number of workers: the protocol of `World`."""
        super().request_workers(workers)
        missing = max(0, workers - len(self.members))
        new = self._step + 1 + self._join_after
        self._due = (self._due + [new] * missing)[:missing]

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Change to a number of members: the protocol of `World`."""
        super().change(workers, leaving)
        self._due = []

    def all_gather_bytes(self, value: bytes, about: str = "", more: str = "") -> list[bytes]:
        """Return the only process's value."""
        return [value]
