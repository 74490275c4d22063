"""Dependence of a worker's step time on the batch size: learned when sizes change, and kept when speeds change.

A shape consists of a few points (size, relative time) and a function `max(floor, slope * b + intercept)` through them,
fitted by weighted least squares with a prior towards proportional time. One point therefore gives a line through the
origin, and two points that differ by less than the noise do not give an arbitrary slope. Arrays hold all workers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ._batch_time import BatchTime

POINTS = 8  # of each worker's shape
PLACES = np.arange(POINTS)[:, None]
SAME = 0.02  # sizes with a smaller relative difference are one point
MISFIT = 0.02  # relative standard deviation of true times from the fitted line
LEAST_VARIANCE = MISFIT**2 / 400  # of a point
KNOWN = 4 * MISFIT**2  # largest variance of a point that is used to detect a floor
PRIOR_ELASTICITY_SD = 0.5  # around 1: time proportional to the batch
CURVATURE = 0.5  # standard deviation of the elasticity's change when the size doubles
FLAT_SPAN, FLAT_RISE = 1.5, 1.08  # a floor: 1.5 times the examples in less than 1.08 times the time
FADE = 1.02  # growth of variances per step in which points are doubted: a factor of 2 in 35 steps


class Line(NamedTuple):
    """Relative times `max(floor, middle * (1 + elasticity * (b / center - 1)))`. A pytree; each of shape=(n,)."""

    floor: np.ndarray
    center: np.ndarray
    middle: np.ndarray
    elasticity: np.ndarray
    elasticity_sd: np.ndarray

    def times(self, level: np.ndarray | float = 1.0) -> BatchTime:
        """Return the line in seconds; `level`: the seconds of a relative time of 1."""
        slope = self.elasticity * self.middle / self.center
        return BatchTime(level * slope, level * (1 - self.elasticity) * self.middle, level * self.floor)

    def variance(self, off: np.ndarray) -> np.ndarray:
        """Return the relative variance of the line at sizes with a relative difference `off` from known ones."""
        return (off * (self.elasticity_sd + CURVATURE * np.minimum(off, 1))) ** 2


class Shape(NamedTuple):
    """Points of n workers' time curves, and the lines through them. A pytree of arrays; methods return a new one."""

    sizes: np.ndarray  # shape=(POINTS, n)
    times: np.ndarray  # shape=(POINTS, n), relative to the level
    variances: np.ndarray  # shape=(POINTS, n), relative; infinite for an unused point
    guesses: np.ndarray  # shape=(POINTS, n), the variances before the first measurement there
    line: Line
    size: np.ndarray  # shape=(n,), int64: the size in force; 0 before the first step
    time: np.ndarray  # shape=(n,), its relative time
    variance: np.ndarray  # shape=(n,), of `time`
    place: np.ndarray  # shape=(n,), int64: index of its point; if it has none yet, the index for a new one

    @classmethod
    def init(cls, n_workers: int) -> Shape:
        """Return the state without points. The first measured size has the relative time 1, by definition."""
        points, one, none = np.ones((POINTS, n_workers)), np.ones(n_workers), np.zeros(n_workers, np.int64)
        free = np.full_like(points, np.inf)
        shape = cls(points, points, free, free, Line(one, one, one, one, one), none, one, 0 * one, none)
        return shape.fitted(none > 0)

    @property
    def smallest(self) -> np.ndarray:
        """Smallest sizes with known times; shape=(n,), infinite if there are none."""
        return np.where(np.isfinite(self.variances), self.sizes, np.inf).min(axis=0)

    def _nearest(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the index of the point nearest to each worker's size, its relative distance, and the index for a new
        point.
        """
        distance = np.where(np.isfinite(self.variances), np.abs(self.sizes / np.maximum(sizes, 1) - 1), np.inf)
        nearest = np.argmin(distance, axis=0)
        return nearest, distance[nearest, np.arange(len(sizes))], np.argmax(distance, axis=0)

    def variance_at(self, sizes: np.ndarray) -> np.ndarray:
        """Return the variance of the line's relative times at sizes; shape=(n,)."""
        nearest, off, _ = self._nearest(sizes)
        return self.variances[nearest, np.arange(len(sizes))] + self.line.variance(np.where(off > SAME, off, 0.0))

    def go_to(self, sizes: np.ndarray, doubted: np.ndarray) -> Shape:
        """Return the state at other sizes, extrapolated along the line from the nearest point.

        Args:
          sizes: shape=(n,), int64.
          doubted: shape=(n,), bool: for these workers, extrapolate from the last size instead, so that errors of the
            points do not look like changes of speed.
        """
        every = np.arange(len(sizes))
        nearest, off, free = self._nearest(sizes)
        first, same, curve = np.isinf(off), off <= SAME, self.line.times()
        from_size = np.where(doubted, self.size, self.sizes[nearest, every])
        from_time = np.where(doubted, self.time, self.times[nearest, every])
        known = np.where(doubted, self.variance, self.variances[nearest, every])
        off = np.where(doubted, np.abs(self.size / sizes - 1), np.where(same, 0.0, off))
        return self._replace(
            size=sizes,
            time=np.where(first, 1.0, from_time * curve(sizes) / curve(from_size)),
            variance=np.where(first, 0.0, known + self.line.variance(off)),
            place=np.where(same, nearest, free),
        )

    def learn(self, surprise: np.ndarray, share: np.ndarray, first: np.ndarray, doubted: np.ndarray) -> Shape:
        """Return the state after an unexpected time: the points of the present sizes move by a share of it.

        Args:
          surprise: relative deviations of the measured times; shape=(n,).
          share: fraction that belongs to the shape; shape=(n,), 0 where nothing is learned.
          first: shape=(n,), bool: whether this is a worker's first step.
          doubted: shape=(n,), bool: whether the variances of a worker's points grow.
        """
        here = (self.place == PLACES) & ((share > 0) | first)
        known = here & np.isfinite(self.variances) & (np.abs(self.sizes - self.size) <= SAME * self.size)
        ratio, left = 1 + share * surprise, 1 - share
        variances = np.where(here, self.variance * left, self.variances)
        faded = np.where(doubted, np.maximum(variances, LEAST_VARIANCE) * FADE, variances)
        return self._replace(
            sizes=np.where(here & ~known, self.size, self.sizes),
            times=np.where(here, np.where(known, self.times, self.time) * ratio, self.times),
            variances=faded,
            guesses=np.where(here & ~known, np.where(first, np.inf, self.variance), self.guesses),
            time=self.time * ratio,
            # Where points are doubted, nothing is learned about the size: the deviation belongs to the level.
            variance=np.where(doubted, 0.0, self.variance * left),
        ).fitted(doubted)

    def fitted(self, doubted: np.ndarray) -> Shape:
        """Return the state with lines fitted to the points; for doubted points, a line close to the prior."""
        sizes, times = self.sizes, self.times
        # The weight of measurements alone, without the initial guess by the line.
        weights = 1 / np.maximum(self.variances, LEAST_VARIANCE) - 1 / np.maximum(self.guesses, LEAST_VARIANCE)
        weights = np.maximum(weights, 0.0)
        known = weights * KNOWN > 1
        low = known & (times <= FLAT_RISE * np.where(known, times, np.inf).min(axis=0))
        largest_low = np.where(low, sizes, 0.0).max(axis=0)
        flat = largest_low >= FLAT_SPAN * np.where(low, sizes, np.inf).min(axis=0)
        floor = np.zeros_like(largest_low)
        if flat.any():
            floor = np.where(flat, _mean(times, np.where(low, weights, 0.0)), 0.0)
            # With a floor, the line is fitted to the points above it, or else starts at the last point on the floor.
            above = known & ~low
            above = np.where(above.any(axis=0), above, low & (sizes >= largest_low))
            weights = np.where(flat & ~above, 0.0, weights)
        center, middle = _mean(sizes, weights), _mean(times, weights)
        x, y = sizes / center - 1, times / middle - 1
        prior = 1 / PRIOR_ELASTICITY_SD**2
        wx = weights * x * np.where(doubted, MISFIT**2, 1.0)
        information = (wx * x).sum(axis=0) + prior
        elasticity = ((wx * y).sum(axis=0) + prior) / information
        elasticity = np.minimum(np.maximum(elasticity, 0.0), 1.0)
        return self._replace(line=Line(floor, center, middle, elasticity, 1 / np.sqrt(information)))


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    total = weights.sum(axis=0)
    return np.where(total > 0, (values * weights).sum(axis=0) / np.where(total > 0, total, 1.0), 1.0)
