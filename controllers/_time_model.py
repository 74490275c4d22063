"""What a worker's step would take on another batch size: learnt from the steps it does.

Two things are learnt of each worker, and kept apart because they change in different ways. Its *shape*, how time goes
with the batch size, hardly ever changes; it is seen only when the size does. Its *level*, how fast the machine is just
now, may change at any step, for all sizes alike. So a surprise at a size that is known is the level's; one at a new
size is the shape's, as far as shapes reach (from flat to proportional, less what is known already), and in between each
has its part, in proportion to how little it is known. What is more than both and noise can explain is the level's: it
jumps, and the shape stays. While a level drifts, a controller makes sizes follow, so that times stay as they are:
whoever learnt shapes from that would find them flat, so nothing is learnt of them then. All workers are in arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._batch_time import BatchTime
from ._level import AHEAD, RESTLESS, SURE, Level
from ._time_shape import MISFIT, Shape

ARRIVAL = 15  # steps at a new size that tell of the size: what comes later tells of the machine


class TimeModel(NamedTuple):
    """What is known of n workers' step times. A pytree of arrays; methods return a new one."""

    level: Level
    shape: Shape
    stay: np.ndarray  # shape=(n,), int64: steps seen since the size changed, or the level jumped
    largest: np.ndarray  # shape=(n,), int64: the largest size ever measured
    left_out: np.ndarray  # shape=(n,), bool: whether the latest step was
    waiting: np.ndarray  # shape=(), int64: steps since `decided`

    @classmethod
    def init(cls, n_workers: int) -> TimeModel:
        """Nothing known."""
        none = np.zeros(n_workers, np.int64)
        return cls(Level.init(n_workers), Shape.init(n_workers), none, none, none > 0, np.asarray(0))

    # --- what it says -------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> np.ndarray:
        """The sizes of the latest step; int64, shape=(n,), 0 before the first."""
        return self.shape.size

    @property
    def measured(self) -> np.ndarray:
        """Which workers have ever been measured; shape=(n,)."""
        return self.level.steps > 0

    @property
    def present(self) -> np.ndarray:
        """Seconds of the next step at the sizes of the latest; shape=(n,), NaN for workers that were never measured."""
        return np.exp(self.level.after(AHEAD)) * self.shape.time

    def fit(self) -> BatchTime:
        """Seconds of the next step for any size; NaN for workers that were never measured."""
        return self.shape.line.times(self.present / self.shape.line.times()(self.sizes))

    def variance(self, sizes: np.ndarray) -> np.ndarray:
        """The relative variance of what `fit` says for sizes, shape=(n,), by noise and for want of knowledge."""
        noise = np.maximum(self.level.noise, MISFIT) ** 2
        level = self.level.variance * noise / self.level.noise**2
        if not np.array_equal(sizes, self.sizes):
            return level + self.shape.variance_at(sizes)
        # The time here is better known than what part of it is the level's.
        return np.minimum(level + self.shape.variance, noise / np.maximum(self.stay, 1))

    # --- what it learns -----------------------------------------------------------------------------------------------

    def observe(self, sizes: np.ndarray, seconds: np.ndarray, due: bool = True) -> TimeModel:
        """Take in one step.

        The first time at a new size is left out if it is surprisingly long: it holds what changing cost. (Not twice in
        a row: then it is slow.) What is not a positive number is missing.

        Args:
          sizes: int, shape=(n,): the sizes that `seconds` were measured at.
          seconds: shape=(n,).
          due: whether a decision follows.
        """
        no_news = self._without_news(sizes, seconds, due)
        if no_news is not None:
            return no_news
        shape, measured, changed = self.shape, self.measured, sizes != self.sizes
        if changed.any():
            shape = shape.go_to(np.array(sizes, np.int64), self.level.unsettled)
        step = np.log(np.where((seconds > 0) & (seconds < np.inf), seconds, np.nan) / shape.time)
        level = self.level.judge(step)
        surprise = np.expm1(step - level.after(1))
        jump = level.jumps(surprise, shape.variance)
        new = changed & (shape.variance > level.noise**2)
        left_out = ~self.left_out & ((changed & ~measured) | (new & jump & (surprise > 0)))
        if left_out.any():
            step, jump = np.where(left_out, np.nan, step), jump & ~left_out
        seen = np.isfinite(step)
        stay = np.where(changed | jump, 0, self.stay)

        # The size's share of the surprise; the rest is the level's.
        first, unsettled = seen & ~measured, level.unsettled
        tells = seen & measured & ~jump & ~unsettled & (stay < ARRIVAL)
        share = np.where(tells, shape.variance / (level.step_variance + shape.variance), 0.0)
        rest = step
        if first.any() or unsettled.any() or share.any():
            surprise = np.where(share > 0, surprise, 0.0)
            shape = shape.learn(surprise, share, first, unsettled & seen)
            rest = step - np.log1p(share * surprise)
        return TimeModel(
            level=level.learn_noise(step, rest, ~new).learn(rest, jump, due),
            shape=shape,
            stay=stay + seen,
            largest=np.where(seen, np.maximum(self.largest, sizes), self.largest),
            left_out=left_out,
            waiting=self.waiting + seen.any(),
        )

    def _without_news(self, sizes: np.ndarray, seconds: np.ndarray, due: bool) -> TimeModel | None:
        """What `observe` comes to where sizes and speeds are as they were, as they mostly are, in a third of the time:
        short steps feel it. `None` where they may not be."""
        level, shape = self.level, self.shape
        settled = (self.stay >= ARRIVAL) & (sizes == shape.size) & (seconds > 0) & (seconds < np.inf)
        if not (settled & ~self.left_out & (level.best == 0) & (level.jumping <= RESTLESS)).all():
            return None
        step = np.log(seconds / shape.time)
        expected = np.abs(np.expm1(step - level.after(1))) <= SURE * level.noise  # false also where nothing is known
        if not (expected & np.isnan(level.before[0]) & np.isfinite(level.latest)).all():
            return None
        return self._replace(level=level.learn_expected(step, due), stay=self.stay + 1, waiting=self.waiting + 1)

    def decided(self) -> TimeModel:
        """Count `waiting` anew."""
        return self._replace(waiting=np.asarray(0))
