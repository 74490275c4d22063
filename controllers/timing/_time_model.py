"""Model of a worker's step time on any batch size, learned from its steps.

The model has two parts for each worker. The *shape*, the dependence of time on the batch size, hardly ever changes, and
is observable only when the size changes. The *level*, the machine's current speed, may change at any step, and affects
all sizes equally. An unexpected time at a known size therefore updates the level; one at a new size updates the shape,
within the possible shapes (from constant to proportional). Between known and new sizes, each part is updated in
proportion to its uncertainty. An error that neither part nor noise explains makes the level jump, and leaves the shape.
While a level drifts, a controller changes sizes so that times stay constant; shapes learned from such steps would be
constant, so shapes are not updated then. Arrays hold all workers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from ._batch_time import BatchTime, same
from .level import AHEAD, Level
from .time_shape import MISFIT, Shape

ARRIVAL = 15  # steps at a new size that update the shape; later steps update the level


class TimeModel(NamedTuple):
    """Model of n workers' step times. A pytree of arrays; methods return a new one."""

    level: Level
    shape: Shape
    stay: np.ndarray  # shape=(n,), int64: steps seen since the size changed, or the level jumped
    largest: np.ndarray  # shape=(n,), int64: the largest size ever measured
    left_out: np.ndarray  # shape=(n,), bool: whether the latest step was ignored
    waiting: np.ndarray  # shape=(), int64: steps since `decided`

    @classmethod
    def init(cls, n_workers: int) -> TimeModel:
        """Return the state without measurements."""
        none = np.zeros(n_workers, np.int64)
        return cls(Level.init(n_workers), Shape.init(n_workers), none, none, none > 0, np.asarray(0))

    # --- predictions --------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> np.ndarray:
        """The sizes of the latest step; int64, shape=(n,), 0 before the first."""
        return self.shape.size

    @property
    def measured(self) -> np.ndarray:
        """Whether each worker was ever measured; shape=(n,)."""
        return self.level.steps > 0

    @property
    def present(self) -> np.ndarray:
        """Expected seconds of the next step at the latest sizes; shape=(n,), NaN for workers never measured."""
        return np.exp(self.level.after(AHEAD)) * self.shape.time

    def fit(self) -> BatchTime:
        """Return the expected seconds of the next step for any size; NaN for workers never measured."""
        return self.shape.line.times(self.present / self.shape.line.times()(self.sizes))

    def of(self, workers: np.ndarray) -> TimeModel:
        """Return the model of some workers, given by their indices."""
        if len(workers) == len(self.stay):
            return self
        return jax.tree.map(lambda part: part[..., workers] if np.ndim(part) else part, self)

    def variance(self, sizes: np.ndarray) -> np.ndarray:
        """Return the relative variance of the predictions of `fit` at `sizes`, shape=(n,)."""
        noise = np.maximum(self.level.noise, MISFIT) ** 2
        level = self.level.variance * noise / self.level.noise**2
        if not np.array_equal(sizes, self.sizes):
            return level + self.shape.variance_at(sizes)
        # The time at a measured size is better known than its division into shape and level.
        return np.minimum(level + self.shape.variance, noise / np.maximum(self.stay, 1))

    # --- updates ------------------------------------------------------------------------------------------------------

    def with_longer_means(self, ratio: float) -> TimeModel:
        """Return the model for times that are means of `ratio` times as many steps as those seen so far."""
        return self._replace(level=self.level.with_longer_means(ratio))

    def observe(self, sizes: np.ndarray, seconds: np.ndarray, due: bool = True) -> TimeModel:
        """Return the model after a step.

        The first time at a new size is ignored if it is unexpectedly long, because it may include the cost of the
        change; two such times in a row are not ignored.

        Args:
          sizes: int, shape=(n,): the sizes at which `seconds` were measured; 0 for workers without examples, which are
            ignored.
          seconds: shape=(n,). Values that are not positive numbers count as unknown.
          due: whether a decision follows.
        """
        calm = self._observe_calm(sizes, seconds, due)
        if calm is not None:
            return calm
        took = sizes > 0
        sizes, seconds = np.where(took, sizes, np.maximum(self.sizes, 1)), np.where(took, seconds, np.nan)
        shape, measured, changed = self.shape, self.measured, sizes != self.sizes
        moved = changed.any()
        if moved:
            shape = shape.go_to(np.array(sizes, np.int64), self.level.unsettled)
        step = np.log(np.where((seconds > 0) & (seconds < np.inf), seconds, np.nan) / shape.time)
        level = self.level.judge(step)
        surprise = np.expm1(step - level.after(1))
        jump = level.jumps(surprise, shape.variance)
        new = left_out = changed
        if moved:
            new = changed & (shape.variance > level.noise**2)
            left_out = ~self.left_out & ((changed & ~measured) | (new & jump & (surprise > 0)))
            if left_out.any():
                step, jump = np.where(left_out, np.nan, step), jump & ~left_out
        seen = np.isfinite(step)
        stay = np.where(changed | jump, 0, self.stay)

        # The shape's share of the deviation; the rest belongs to the level.
        first, unsettled = seen & ~measured, level.unsettled
        informative = seen & measured & ~jump & ~unsettled & (stay < ARRIVAL)
        rest, share = step, np.zeros(len(step))
        if informative.any():
            share = np.where(informative, shape.variance / (level.step_variance + shape.variance), 0.0)
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

    def _observe_calm(self, sizes: np.ndarray, seconds: np.ndarray, due: bool) -> TimeModel | None:
        """Return the same as `observe`, bitwise, for an ordinary step: known sizes as before, all workers measured, and
        levels that neither drift nor jump. `None` for other steps.
        """
        shape, n = self.shape, len(sizes)
        if (
            not same(sizes, shape.size)
            or np.count_nonzero(self.stay >= ARRIVAL) < n
            or np.count_nonzero((seconds > 0) & (seconds < np.inf)) < n
        ):
            return None
        level = self.level.calm(np.log(seconds / shape.time), shape.variance)
        if level is None:
            return None
        level = level.compared() if due else level
        return TimeModel(level, shape, self.stay + 1, self.largest, self.left_out, self.waiting + 1)

    def decided(self) -> TimeModel:
        """Return the model with `waiting` reset."""
        return self._replace(waiting=np.asarray(0))
