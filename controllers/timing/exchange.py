"""Model of a step's time besides computing, mostly the exchange, by number of workers.

It passes through the present exchange; how it grows with the workers is the least-squares line through the numbers of
workers that this run has had.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SETTLE = 2  # steps after a change whose times are affected by the change
MEMORY = 20  # steps over which seconds are averaged
FADES = 0.7  # factor on the weight of earlier numbers of workers, at each change
POINTS = 8  # number of earlier numbers of workers that are kept


class Exchange(NamedTuple):
    """Mean seconds besides computing, by number of workers. A pytree; methods return a new one.

    Without a second number of workers the slope is 0, so that a policy tries more workers.

    References:
      Qiao et al. 2021, "Pollux", section 3.1: `alpha + beta * max(K - 2, 0)` for K replicas.
    """

    workers: np.ndarray  # shape=(), int64: number of workers in the latest step; 0 before the first
    batch: np.ndarray  # shape=(), int64: examples in the latest step
    steps: np.ndarray  # shape=(), int64: steps with these
    present: np.ndarray  # shape=(), mean seconds besides computing over these steps; NaN at first
    past: np.ndarray  # shape=(POINTS, 3): workers, seconds and weight of earlier numbers of workers; weight 0: none

    @classmethod
    def init(cls) -> Exchange:
        """Return the state without measurements."""
        none = np.asarray(0)
        return cls(none, none, none, np.asarray(np.nan), np.zeros((POINTS, 3)))

    @property
    def known(self) -> bool:
        """Whether there are measurements with the present workers and batch."""
        return bool(self.present >= 0)

    def see(self, workers: int, batch: int, compute: float, seconds: float) -> Exchange:
        """Return the state after a step of `seconds`, with the slowest worker's; NaN if unknown."""
        if workers != self.workers or batch != self.batch:
            left = self.past if workers == self.workers else self._left()
            return Exchange(np.asarray(workers), np.asarray(batch), np.asarray(1), np.asarray(np.nan), left)
        now = self._replace(steps=self.steps + 1)
        if now.steps <= SETTLE or not (np.isfinite(seconds) and 0 < compute < np.inf):
            return now
        new, mean = max(seconds - compute, 0.0), float(now.present)
        if mean >= 0:  # a pause counts as twice the mean
            new = mean + ((2 * mean if new > 10 * mean > 0 else new) - mean) / MEMORY
        return now._replace(present=np.asarray(new))

    def seconds(self, workers: int) -> float:
        """Return the seconds besides computing of a step of so many workers."""
        x, y, weight = self._points().T
        x = x - (weight * x).sum() / weight.sum()
        spread = (weight * x * x).sum()
        slope = max(0.0, (weight * x * y).sum() / spread) if spread > 1e-9 * weight.sum() else 0.0
        return max(0.0, float(self.present) + slope * (workers - int(self.workers)))

    def _points(self) -> np.ndarray:
        """Return the present number of workers and the earlier ones as rows of `past`."""
        weight = float(min(int(self.steps) - SETTLE, MEMORY))
        earlier = (self.past[:, 2] > 0) & (self.past[:, 0] != self.workers)
        return np.concatenate([[[float(self.workers), float(self.present), weight]], self.past[earlier]])

    def _left(self) -> np.ndarray:
        """Return `past` with the present number of workers, if it was measured, as its first row."""
        if not self.known:
            return self.past
        rows = self._points()[:POINTS] * np.array([1.0, 1.0, FADES])
        return np.concatenate([rows, np.zeros((POINTS - len(rows), 3))])
