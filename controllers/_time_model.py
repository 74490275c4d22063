"""What a worker's step would take on another batch size: learnt from the steps it does.

Two things are learnt of each worker, and kept apart because they change in different ways. Its *shape*, how time goes
with the batch size, hardly ever changes; it is seen only when the size does. Its *level*, how fast the machine is just
now, may change at any step, for all sizes alike. So a surprise at a size that is known is the level's; one at a new
size is the shape's, as far as shapes reach (from flat to proportional, less what is known already). What is more than
noise and shape can explain is a step change of speed: the level follows it at once, and the shape stays.

The shape is a few points (size, relative time), through which goes `max(floor, slope * b + intercept)`, fitted by
weighted least squares with a prior towards proportional time, so that one point makes a line through the origin (the
one-point rule), and two that noise cannot tell apart do not make a wild one. The level is a mean that forgets
exponentially. All workers are in arrays: no loop over them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._batch_time import BatchTime

WINDOW = 32  # steps at most that one estimate is made of
POINTS = 8  # of each worker's shape
MEMORY = 100.0  # steps that a level remembers
SURE = 4.5  # standard deviations that make a surprise a change of speed: a thousand steps have many windows
SAME = 0.02  # sizes that differ relatively by less are one point
LEAST_NOISE = 0.02  # relative; also covers that time is not quite a line
PRIOR_ELASTICITY_SD = 0.5  # around 1: time proportional to the batch
CURVATURE = 0.5  # how much the elasticity may differ at twice the size
FLAT_SPAN, FLAT_RISE = 1.5, 1.08  # 1.5 times the examples in less than 1.08 times the time: a floor


class TimeModel(NamedTuple):
    """What is known of n workers' step times. A pytree of arrays; methods return a new one."""

    sizes: np.ndarray  # shape=(n,), int64: the sizes that the window was measured at; 0 before the first step
    window: np.ndarray  # shape=(WINDOW, n), seconds of the latest steps, oldest first; NaN where there are none
    level: np.ndarray  # shape=(n,), seconds for a relative time of 1; NaN until measured
    steps: np.ndarray  # shape=(n,), how many steps' worth the level is known to
    noise: np.ndarray  # shape=(n,), relative standard deviation of one step's time
    largest: np.ndarray  # shape=(n,), int64: the largest size ever measured
    point_sizes: np.ndarray  # shape=(POINTS, n)
    point_times: np.ndarray  # shape=(POINTS, n), relative to the level
    point_weights: np.ndarray  # shape=(POINTS, n), how many steps' worth each is known to; 0 for a free place

    @classmethod
    def init(cls, n_workers: int) -> TimeModel:
        """Nothing known."""
        n = n_workers
        return cls(
            sizes=np.zeros(n, np.int64),
            window=np.full((WINDOW, n), np.nan),
            level=np.full(n, np.nan),
            steps=np.zeros(n),
            noise=np.full(n, 0.05),
            largest=np.zeros(n, np.int64),
            point_sizes=np.ones((POINTS, n)),
            point_times=np.ones((POINTS, n)),
            point_weights=np.zeros((POINTS, n)),
        )

    @property
    def measured(self) -> np.ndarray:
        """Which workers have ever been measured; shape=(n,)."""
        return np.isfinite(self.level)

    @property
    def waiting(self) -> int:
        """Steps in the window: of the worker of which there are most."""
        return int(np.isfinite(self.window).sum(axis=0).max())

    def observe(self, sizes: np.ndarray, seconds: np.ndarray) -> TimeModel:
        """Take in one step.

        The first time at a new size is left out: it holds what changing cost. What is not a positive number is
        missing.

        Args:
          sizes: int, shape=(n,): the sizes that `seconds` were measured at.
          seconds: shape=(n,).
        """
        model = self
        changed = sizes != model.sizes
        seconds = np.where((seconds > 0) & (seconds < np.inf) & ~changed, seconds, np.nan)
        if changed.any():
            model = model.digest()._replace(sizes=np.array(sizes, np.int64))
        return model._replace(window=np.concatenate([model.window[1:], seconds[None]]))

    def digest(self) -> TimeModel:
        """Turn the window into what is known, and empty it."""
        mean, count, noise = _summarise(self.window, self.noise, self.steps)
        seen = count > 0
        if not seen.any():
            return self
        every = np.arange(len(count))
        first = seen & ~self.measured
        known = self.point_weights > 0
        distance = np.where(known, np.abs(self.point_sizes / np.maximum(self.sizes, 1) - 1), np.inf)
        nearest = np.argmin(distance, axis=0)
        off = np.where(known[0], distance[nearest, every], 0.0)  # the first place is taken first
        same = ~first & (off <= SAME)

        # How surprising is the mean, and by what may the surprise be explained? Variances are relative.
        expected, elasticity_sd = self._expect(nearest, known_size=bool((same | ~seen | first).all()))
        surprise = np.where(seen & ~first, mean / expected - 1, 0.0)
        of_level = noise**2 / np.maximum(self.steps, 1)
        of_point = noise**2 / np.maximum(self.point_weights[nearest, every], 1)
        of_shape = np.where(same, of_point, _of_shape(off, elasticity_sd))
        variance = noise**2 / np.maximum(count, 1) + np.where(first, 0.0, of_level + of_shape)
        jump = surprise**2 > SURE**2 * variance

        # The level's share of it moves the level; the rest is the point's.
        share = np.where(jump, 1.0, np.where(first, 0.0, of_level / variance))
        level = np.where(first, mean, self.level * (1 + share * surprise))
        steps = np.where(first | jump, count, np.minimum(self.steps + count, MEMORY))
        refined = self.point_times[nearest, every] * (1 + np.where(jump, 0.0, of_shape / variance) * surprise)
        place = np.where(same, nearest, np.argmax(distance, axis=0))  # a free place, or else the farthest point's
        sizes, times, weights = self.point_sizes.copy(), self.point_times.copy(), self.point_weights.copy()
        at = place[seen], every[seen]
        old = weights[place, every]
        sizes[at] = np.where(same, sizes[place, every], self.sizes)[seen]
        times[at] = np.where(same, refined, mean / level)[seen]
        # A jump at a new size says nothing about the shape there.
        weights[at] = np.where(same, np.minimum(old + count, 4 * MEMORY), np.where(jump, 1.0, count))[seen]
        return TimeModel(
            sizes=self.sizes,
            window=np.full_like(self.window, np.nan),
            level=np.where(seen, level, self.level),
            steps=np.where(seen, steps, self.steps),
            noise=noise,
            largest=np.where(seen, np.maximum(self.largest, self.sizes), self.largest),
            point_sizes=sizes,
            point_times=times,
            point_weights=weights,
        )

    def fit(self) -> BatchTime:
        """Seconds per step for any size; NaN for workers that were never measured."""
        floor, center, middle, elasticity, _ = self._line()
        return BatchTime(
            slope=self.level * elasticity * middle / center,
            intercept=self.level * (1 - elasticity) * middle,
            floor=self.level * floor,
        )

    def deviation(self, sizes: np.ndarray) -> np.ndarray:
        """The relative standard deviation of what `fit` says for sizes; shape=(n,).

        How fast the worker is just now is known to its noise over the steps it was seen in. Away from sizes that it
        was seen with, not knowing its shape adds to that.
        """
        noise = np.maximum(self.noise, LEAST_NOISE)
        variance = noise**2 / np.maximum(self.steps, 1)
        off = np.where(self.point_weights > 0, np.abs(self.point_sizes / np.maximum(sizes, 1) - 1), np.inf).min(axis=0)
        if (off > SAME).any():
            variance = variance + np.where(off > SAME, _of_shape(off, self._line()[-1]), 0.0)
        return np.sqrt(variance)

    def _expect(self, nearest: np.ndarray, known_size: bool) -> tuple[np.ndarray, np.ndarray | float]:
        """Seconds at the window's sizes, from the nearest point on as the line goes; and how sure the elasticity is."""
        every = np.arange(len(nearest))
        there = self.level * self.point_times[nearest, every]
        if known_size:
            return there, 0.0
        floor, center, middle, elasticity, elasticity_sd = self._line()
        line = BatchTime(elasticity * middle / center, (1 - elasticity) * middle, floor)
        return there * line(self.sizes) / line(self.point_sizes[nearest, every]), elasticity_sd

    def _line(self) -> tuple[np.ndarray, ...]:
        """Floor, centre (size, relative time), elasticity at the centre and its standard deviation; each shape=(n,)."""
        sizes, times, weights = self.point_sizes, self.point_times, self.point_weights
        known = weights > 0
        low = known & (times <= FLAT_RISE * np.where(known, times, np.inf).min(axis=0))
        largest_low = np.where(low, sizes, 0.0).max(axis=0)
        flat = largest_low >= FLAT_SPAN * np.where(low, sizes, np.inf).min(axis=0)
        floor = np.zeros_like(largest_low)
        if flat.any():
            floor = np.where(flat, _mean(times, np.where(low, weights, 0.0)), 0.0)
            # On a floor, the line goes through what is above it, or else starts where the floor was last seen.
            above = known & ~low
            above = np.where(above.any(axis=0), above, low & (sizes >= largest_low))
            weights = np.where(flat & ~above, 0.0, weights)

        center, middle = _mean(sizes, weights), _mean(times, weights)
        x, y = sizes / center - 1, times / middle - 1
        precision = 1 / np.maximum(self.noise, LEAST_NOISE) ** 2
        prior = 1 / PRIOR_ELASTICITY_SD**2
        wx = weights * x
        information = precision * (wx * x).sum(axis=0) + prior
        elasticity = ((precision * (wx * y).sum(axis=0) + prior) / information).clip(0.0, 1.0)
        return floor, center, middle, elasticity, 1 / np.sqrt(information)


def _of_shape(off: np.ndarray, elasticity_sd: np.ndarray | float) -> np.ndarray:
    """The relative variance of a time at a size that is relatively so far `off` the nearest one known."""
    return (off * (elasticity_sd + CURVATURE * np.minimum(off, 1))) ** 2


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    total = weights.sum(axis=0)
    return np.where(total > 0, (values * weights).sum(axis=0) / np.where(total > 0, total, 1.0), 1.0)


def _summarise(window: np.ndarray, noise: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean of each worker's latest steps, of how many, and their relative noise; each shape=(n,).

    Steps far from the median are left out: a pause of the machine is not its speed. And where the later half differs
    from the earlier by more than noise, the speed has changed on the way, and the earlier half is out of date.
    """
    window = window[np.isfinite(window).any(axis=1)]
    if not len(window):
        nothing = np.zeros(window.shape[1])
        return nothing, nothing, noise
    if len(window) >= 4:
        half = len(window) // 2
        early, late = _median(window[:half]), _median(window[half:])
        noise = _update_noise(window, noise, steps)
        tolerance = SURE * 1.25 * 2 / np.sqrt(len(window)) * np.maximum(noise, LEAST_NOISE)
        moved = np.abs(late / early - 1) > tolerance
        if moved.any():
            window = np.concatenate([np.where(moved, np.nan, window[:half]), window[half:]])
    typical = np.abs(window / _median(window) - 1) <= 3.5 * np.maximum(noise, LEAST_NOISE)
    count = typical.sum(axis=0, dtype=np.float64)
    return np.where(typical, window, 0.0).sum(axis=0) / np.maximum(count, 1), count, noise


def _update_noise(window: np.ndarray, noise: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """From differences of neighbouring steps: a change of speed is in one of them, and their median does not see it."""
    relative = np.abs(window[1:] / window[:-1] - 1)
    count = np.isfinite(relative).sum(axis=0)
    found = np.minimum(_median(relative) / 0.954, 1.0)  # for a normal distribution: sqrt(2) * 0.6745
    trust = np.where(count >= 3, count / (count + 3 + np.minimum(steps, 20)), 0.0)
    return np.where(trust > 0, np.sqrt(noise**2 + trust * (found**2 - noise**2)), noise)


def _median(values: np.ndarray) -> np.ndarray:
    """Per column, NaN left out; NaN where there is nothing. (np.nanmedian takes twenty times as long, and warns.)"""
    ordered = np.sort(values, axis=0)  # NaN last
    if not np.isnan(ordered[-1]).any():
        return 0.5 * (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2])
    count = np.isfinite(values).sum(axis=0)
    every = np.arange(values.shape[1])
    return 0.5 * (ordered[np.maximum(count - 1, 0) // 2, every] + ordered[count // 2, every])
