"""Model of a step's time besides computing, mostly the exchange, which may overlap with computing.

A step of n workers, the slowest of which computes for C seconds, takes

    T = (C^gamma + X(n)^gamma)^(1/gamma)

seconds. With gamma = 1 the exchange follows the computation; the larger gamma, the more of it is hidden, up to
`max(C, X)`. Only T and C are measured. At the present operating point the model passes through both, for any gamma.
Gamma is fitted to the other operating points of this run, at which the batch or the number of workers was different.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

SETTLE = 2  # steps after a change whose times are affected by the change
MEMORY = 20  # steps over which seconds are averaged
FADES = 0.7  # factor on the weight of earlier operating points, at each change
POINTS = 8  # number of earlier operating points that are kept
GAMMAS = np.geomspace(1.0, 10.0, 33)
MOST_OVERLAP = GAMMAS[-1:]
PRIOR = 1e-3  # relative error of the fit that an increase of gamma by 1 must save


class StepTime(NamedTuple):
    """Seconds of a step, as a function of the number of workers and of the seconds that the slowest computes."""

    gamma: float  # from 1, no overlap, to 10
    workers: int  # the present number
    exchange: float  # seconds of the exchange at that number, whether hidden or not
    slope: float  # additional seconds per additional worker; not negative

    def __call__(self, workers: int, compute: float) -> float:
        """Return the seconds of a step of `workers`, of which the slowest computes for `compute` seconds."""
        exchange = max(0.0, self.exchange + self.slope * (workers - self.workers))
        return float(overlapped(compute, exchange, self.gamma))


class Exchange(NamedTuple):
    """Mean seconds of steps by operating point: number of workers and global batch. A pytree; methods return a new one.

    Without a second operating point, gamma is 1. Without a second number of workers, the slope is 0, so that a policy
    tries more workers. Earlier points determine the level only as far as the present exchange is hidden, because other
    traffic on the network changes the level more than the slope.

    References:
      Qiao et al. 2021, "Pollux", section 3.1: gamma from 1 to 10; `alpha + beta * max(K - 2, 0)` for K replicas.
    """

    workers: np.ndarray  # shape=(), int64: number of workers in the latest step; 0 before the first
    batch: np.ndarray  # shape=(), int64: examples in the latest step
    steps: np.ndarray  # shape=(), int64: steps at this operating point
    compute: np.ndarray  # shape=(), mean seconds of the slowest worker over these steps; NaN at first
    seconds: np.ndarray  # shape=(), mean seconds of these steps; NaN at first
    past: np.ndarray  # shape=(POINTS, 5): workers, batch, compute, seconds and weight of earlier points; weight 0: none

    @classmethod
    def init(cls) -> Exchange:
        """Return the state without measurements."""
        none, unknown = np.asarray(0), np.asarray(np.nan)
        return cls(none, none, none, unknown, unknown, np.zeros((POINTS, 5)))

    @property
    def known(self) -> bool:
        """Whether there are measurements at the present operating point."""
        return bool(self.seconds >= 0)

    def see(self, workers: int, batch: int, compute: float, seconds: float) -> Exchange:
        """Return the state after a step.

        Args:
          workers: number of workers that took part.
          batch: examples of the step, over all workers.
          compute: seconds that the slowest worker computed; NaN if unknown.
          seconds: seconds of the whole step; NaN if unknown.
        """
        if workers != self.workers or batch != self.batch:
            unknown = np.asarray(np.nan)
            return Exchange(np.asarray(workers), np.asarray(batch), np.asarray(1), unknown, unknown, self._left())
        now = self._replace(steps=self.steps + 1)
        if now.steps <= SETTLE or not (np.isfinite(seconds) and 0 < compute < np.inf):
            return now
        rest = average(now.seconds - now.compute, seconds - compute)
        compute = float(average(now.compute, compute))
        return now._replace(compute=np.asarray(compute), seconds=np.asarray(compute + rest))

    @property
    def single(self) -> bool:
        """Whether only the present operating point was measured."""
        return not (self.past[:, 4] > 0).any()

    def fit(self, gammas: np.ndarray = GAMMAS) -> StepTime:
        """Return the model that explains all operating points best.

        Args:
          gammas: the values of gamma to choose from, ascending; shape=(k,).
        """
        n, _, compute, seconds, weight = self._all().T
        gamma = gammas[:, None]
        hidden = (compute / seconds) ** gamma
        exchange = seconds * np.maximum(1 - hidden, 0.0) ** (1 / gamma)  # shape=(gammas, points)
        visible = (exchange / seconds) ** (2 * (gamma - 1))  # squared derivative of the seconds by the exchange
        here = n - float(self.workers)
        w = weight * visible
        slope = _slope(here, exchange, w)
        level_weight = np.where(np.arange(len(n)) == 0, w, w * (1 - visible[:, :1]))  # the first point is the present
        level = ((exchange - slope[:, None] * here) * level_weight).sum(1) / np.maximum(level_weight.sum(1), 1e-300)
        predicted = overlapped(compute, np.maximum(level[:, None] + slope[:, None] * here, 0.0), gamma)
        error = np.sqrt((weight * np.log(predicted / seconds) ** 2).sum(1) / weight.sum())
        best = int(np.argmin(error + PRIOR * (gammas - 1)))
        return StepTime(float(gammas[best]), int(self.workers), float(level[best]), float(slope[best]))

    def _all(self) -> np.ndarray:
        """Return the present operating point and the earlier ones as rows of `past`."""
        weight = float(min(int(self.steps) - SETTLE, MEMORY))
        now = [float(x) for x in (self.workers, self.batch, self.compute, self.seconds)]
        rows = self.past[self.past[:, 4] > 0]
        return np.concatenate([np.array([[*now, weight]]), rows[(rows[:, :2] != now[:2]).any(1)]])

    def _left(self) -> np.ndarray:
        """Return `past` with the present operating point, if it was measured, as its first row."""
        if not self.known:
            return self.past
        rows = self._all()[:POINTS] * np.array([1.0, 1.0, 1.0, 1.0, FADES])
        return np.concatenate([rows, np.zeros((POINTS - len(rows), 5))])


def overlapped(compute: Any, exchange: Any, gamma: Any) -> Any:
    """Return `(compute^gamma + exchange^gamma)^(1/gamma)`, the seconds of a step; arrays are broadcast."""
    longer, shorter = np.maximum(compute, exchange), np.minimum(compute, exchange)
    return longer * (1 + (shorter / np.where(longer > 0, longer, 1.0)) ** gamma) ** (1 / np.asarray(gamma))


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


def _slope(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the slopes of weighted lines, not below 0; x: shape=(points,), y and w: shape=(lines, points)."""
    total = np.maximum(w.sum(1, keepdims=True), 1e-300)
    x = x - (w * x).sum(1, keepdims=True) / total
    spread = (w * x * x).sum(1)
    slope = (w * x * y).sum(1) / np.maximum(spread, 1e-300)
    return np.where(spread > 1e-9 * w.sum(1), np.maximum(slope, 0.0), 0.0)
