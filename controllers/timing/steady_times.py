"""Mean step times since sizes last changed, which the published policies use."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class SteadyTimes(NamedTuple):
    """Each worker's mean seconds at the sizes in force. A pytree of arrays; methods return a new one."""

    sizes: np.ndarray  # shape=(n,), int64: the sizes in force; 0 before the first step
    mean: np.ndarray  # shape=(n,), seconds; NaN where there are none yet
    taken: np.ndarray  # shape=(n,), int64: steps in the mean

    @classmethod
    def init(cls, n_workers: int) -> SteadyTimes:
        """Return the state without measurements."""
        return cls(np.zeros(n_workers, np.int64), np.full(n_workers, np.nan), np.zeros(n_workers, np.int64))

    def observe(self, sizes: np.ndarray, seconds: np.ndarray, smoothing: float = 0.0) -> SteadyTimes:
        """Return the state after a step. Means restart when sizes change; the first time at a new size is skipped.

        `smoothing`: the weight of a new time against the mean; 0 for the plain mean of all.
        """
        changed = sizes != self.sizes
        start = changed.any()
        mean = np.full_like(self.mean, np.nan) if start else self.mean
        count = np.zeros_like(self.taken) if start else self.taken
        valid = (seconds > 0) & (seconds < np.inf) & ~changed
        weight = smoothing or 1.0 / (count + 1)
        moved = np.where(count == 0, seconds, mean + weight * (seconds - mean))
        return SteadyTimes(np.array(sizes, np.int64), np.where(valid, moved, mean), count + valid)

    def ready(self, sizes: tuple[int, ...], window: int) -> bool:
        """Return whether all workers with examples were measured at these sizes, and one of them `window` times.

        False right after a change, because times arrive one step late.
        """
        current = (self.sizes == np.asarray(sizes)).all()
        taken = self.taken[np.asarray(sizes) > 0]
        return bool(current and taken.min() > 0 and taken.max() >= window)
