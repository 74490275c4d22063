"""Model of a step's time besides computing, mostly the exchange, as a function of the number of workers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SETTLE = 2  # steps after a change whose times are affected by the change
MEMORY = 20  # steps over which seconds are averaged
FADES = 0.7  # factor on the weight of earlier numbers of workers, at each change of the number


class Exchange(NamedTuple):
    """A line over the number of workers, through the mean seconds at the present number. A pytree.

    Earlier numbers of workers determine only the slope, because other traffic on the network changes the level more
    than the slope. Until a second number of workers is measured, the slope is 0, so that a policy tries more workers.

    References:
      Qiao et al. 2021, "Pollux", section 3.1: `alpha + beta * max(K - 2, 0)` for K replicas.
    """

    workers: np.ndarray  # shape=(), int64: number of workers in the latest step; 0 before the first
    steps: np.ndarray  # shape=(), int64: steps with this number of workers
    seconds: np.ndarray  # shape=(), mean over these steps; NaN at first
    past: np.ndarray  # shape=(5,), of earlier numbers n with seconds t: sums of w, w n, w n^2, w t, w n t

    @classmethod
    def init(cls) -> Exchange:
        """Return the state without measurements."""
        none = np.asarray(0)
        return cls(none, none, np.asarray(np.nan), np.zeros(5))

    @property
    def known(self) -> bool:
        """Whether there are measurements."""
        return bool(self.seconds >= 0)

    def see(self, workers: int, seconds: float) -> Exchange:
        """Return the state after a step.

        Args:
          workers: number of workers that took part.
          seconds: seconds in which no worker computed; NaN if unknown.
        """
        if workers != self.workers:
            return Exchange(np.asarray(workers), np.asarray(1), np.asarray(np.nan), FADES * self._all())
        now = self._replace(steps=self.steps + 1)
        if now.steps <= SETTLE or not np.isfinite(seconds):
            return now
        return now._replace(seconds=average(self.seconds, seconds))

    @property
    def slope(self) -> float:
        """Additional seconds per additional worker; not negative."""
        w, n, nn, t, nt = self._all()
        spread = w * nn - n * n
        return max(0.0, float((w * nt - n * t) / spread)) if spread > 1e-9 * max(w * nn, 1.0) else 0.0

    def of(self, workers: int) -> float:
        """Return the expected seconds with another number of workers."""
        return max(0.0, float(self.seconds) + self.slope * (workers - int(self.workers)))

    def _all(self) -> np.ndarray:
        if not self.known:
            return self.past
        n, t, w = float(self.workers), float(self.seconds), float(min(int(self.steps) - SETTLE, MEMORY))
        return self.past + w * np.array([1.0, n, n * n, t, n * t])


def average(mean: np.ndarray, new: float) -> np.ndarray:
    """Return a moving average over `MEMORY` steps after a new value. A value above ten times the mean is a pause, and
    counts as twice the mean; NaN is skipped.
    """
    if not np.isfinite(new):
        return mean
    new = max(new, 0.0)
    if not np.isfinite(mean):
        return np.asarray(new)
    old = 1 - 1 / MEMORY
    return old * mean + (1 - old) * (new if new < 10 * mean or mean == 0 else 2 * mean)
