"""Membership of a simulated cluster: workers join some steps after a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adaptive.base.worker_slots import WorkerSlots
from adaptive.base.world import World

from ._cluster import Cluster


class Workers(WorkerSlots, World):
    """The worker slots of a simulated cluster. Without a reserve, workers that return join without a request.

    Raises a ValueError if no worker is available at the start.
    """

    def __init__(self, cluster: Cluster):
        capacity, first = cluster.workers, cluster.first
        super().__init__(capacity, first)
        self.respawn, self.workers = cluster.respawn, range(capacity)
        self._cluster, self._step = cluster, 0
        self._left: set[int] = set()  # slots whose workers have left for good
        self._due: list[int] = []  # for each requested worker, the step before which it is ready
        gone = self._absent(1)
        if len(gone) == capacity:
            raise ValueError("simulate: the first step has no workers.")
        there = [slot for slot in range(capacity) if slot not in gone][:first]
        self._gone = gone
        self._joined_in = [0 if slot in there else None for slot in range(capacity)]

    def _absent(self, step: int) -> set[int]:
        present = self._cluster.present
        return set() if present is None else set(np.flatnonzero(~np.asarray(present(step))).tolist())

    def begin(self, step: int) -> None:
        """Apply the losses and returns before a step. Raises a ValueError if no worker is left."""
        self._step = step
        gone = self._absent(step) | self._left
        lost, back = sorted(gone & set(self.members)), sorted(self._gone - gone)
        self._gone = gone
        for slot in back if self._cluster.first is None else []:
            self.join(slot)
        for slot in lost:
            if len(self.members) == 1:
                raise ValueError(f"simulate: all workers are lost in step {step}.")
            self.leave(slot)

    def poll_ready(self) -> int:
        """Return how many requested workers are ready to join."""
        return min(super().poll_ready(), sum(due <= self._step for due in self._due))

    def request_workers(self, workers: int) -> None:
        """Request a number of workers: see `World.request_workers`."""
        super().request_workers(workers)
        missing = max(0, workers - len(self.members))
        new = self._step + 1 + self._cluster.join_after
        self._due = (self._due + [new] * missing)[:missing]

    def change(self, workers: int, leaving: Sequence[int] = ()) -> None:
        """Change the number of members: see `World.change`."""
        super().change(workers, leaving)
        self._left |= set(leaving)
        self._due = []
