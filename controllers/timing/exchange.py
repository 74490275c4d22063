"""What a step takes beside computing, as a function of how many workers there are: mostly the exchange."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SETTLE = 2  # steps after a change that tell of the change
MEMORY = 20  # steps over which seconds are averaged
FADES = 0.7  # what an earlier number of workers counts, each time that there is another one


class Exchange(NamedTuple):
    """A line over the number of workers, through the seconds at the present one. A pytree.

    What is known of earlier numbers gives the slope, and nothing else: how long an exchange takes changes with what
    others do on the network, how it goes with the number of workers hardly. Before a second number is seen, the slope
    is 0: an optimist tries.

    References:
      Qiao et al. 2021, "Pollux", section 3.1: `alpha + beta * max(K - 2, 0)` for K replicas.
    """

    workers: np.ndarray  # shape=(), int64: how many there were in the latest step; 0 before the first
    steps: np.ndarray  # shape=(), int64: since there have been so many
    seconds: np.ndarray  # shape=(), mean over these steps; NaN at first
    past: np.ndarray  # shape=(5,), of earlier numbers n with seconds t: sums of w, w n, w n^2, w t, w n t

    @classmethod
    def init(cls) -> Exchange:
        """Nothing known."""
        none = np.asarray(0)
        return cls(none, none, np.asarray(np.nan), np.zeros(5))

    @property
    def known(self) -> bool:
        """Whether there are measurements."""
        return bool(self.seconds >= 0)

    def see(self, workers: int, seconds: float) -> Exchange:
        """Take in a step.

        Args:
          workers: how many took part.
          seconds: in which nobody computed; NaN if that is not known.
        """
        if workers != self.workers:
            return Exchange(np.asarray(workers), np.asarray(1), np.asarray(np.nan), FADES * self._all())
        now = self._replace(steps=self.steps + 1)
        if now.steps <= SETTLE or not np.isfinite(seconds):
            return now
        return now._replace(seconds=average(self.seconds, seconds))

    @property
    def slope(self) -> float:
        """Seconds that one worker more takes, of all; not negative."""
        w, n, nn, t, nt = self._all()
        spread = w * nn - n * n
        return max(0.0, float((w * nt - n * t) / spread)) if spread > 1e-9 * max(w * nn, 1.0) else 0.0

    def of(self, workers: int) -> float:
        """Seconds with another number of workers."""
        return max(0.0, float(self.seconds) + self.slope * (workers - int(self.workers)))

    def _all(self) -> np.ndarray:
        if not self.known:
            return self.past
        n, t, w = float(self.workers), float(self.seconds), float(min(int(self.steps) - SETTLE, MEMORY))
        return self.past + w * np.array([1.0, n, n * n, t, n * t])


def average(mean: np.ndarray, new: float) -> np.ndarray:
    """Over some `MEMORY` steps. A step ten times the mean is a pause, and counts as twice the mean; one that is not
    known counts for nothing.
    """
    if not np.isfinite(new):
        return mean
    new = max(new, 0.0)
    if not np.isfinite(mean):
        return np.asarray(new)
    old = 1 - 1 / MEMORY
    return old * mean + (1 - old) * (new if new < 10 * mean or mean == 0 else 2 * mean)
