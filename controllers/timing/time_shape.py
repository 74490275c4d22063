"""Dependence of a worker's step time on the batch size: learned when sizes change, and kept when speeds change.

A shape is a few points (size, relative time), through which goes `max(floor, slope * b + intercept)`, fitted by
weighted least squares with a prior towards proportional time, so that one point makes a line through the origin (the
one-point rule), and two that noise cannot tell apart do not make a wild one. All workers are in arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .batch_time import BatchTime

POINTS = 8  # of each worker's shape
PLACES = np.arange(POINTS)[:, None]
SAME = 0.02  # sizes that differ relatively by less are one point
MISFIT = 0.02  # relative: how far times may be off the line that goes through them
LEAST_VARIANCE = MISFIT**2 / 400  # of a point
KNOWN = 4 * MISFIT**2  # of variance, or less, by measurement: a point that may tell of a floor
PRIOR_ELASTICITY_SD = 0.5  # around 1: time proportional to the batch
CURVATURE = 0.5  # how much the elasticity may differ at twice the size
FLAT_SPAN, FLAT_RISE = 1.5, 1.08  # 1.5 times the examples in less than 1.08 times the time: a floor
FADE = 1.02  # times which variances grow in a step in which points are doubted: twice in 35 steps


class Line(NamedTuple):
    """Relative times `max(floor, middle * (1 + elasticity * (b / center - 1)))`. A pytree; each of shape=(n,)."""

    floor: np.ndarray
    center: np.ndarray
    middle: np.ndarray
    elasticity: np.ndarray
    elasticity_sd: np.ndarray

    def times(self, level: np.ndarray | float = 1.0) -> BatchTime:
        """Return the line in seconds, with `level` seconds for a relative time of 1."""
        slope = self.elasticity * self.middle / self.center
        return BatchTime(level * slope, level * (1 - self.elasticity) * self.middle, level * self.floor)

    def variance(self, off: np.ndarray) -> np.ndarray:
        """Return the relative variance of the line at a size that differs relatively by `off` from a known one."""
        return (off * (self.elasticity_sd + CURVATURE * np.minimum(off, 1))) ** 2


class Shape(NamedTuple):
    """Points of n workers' time curves, and the lines through them. A pytree of arrays; methods return a new one."""

    sizes: np.ndarray  # shape=(POINTS, n)
    times: np.ndarray  # shape=(POINTS, n), relative to the level
    variances: np.ndarray  # shape=(POINTS, n), relative; infinite for a free place
    guesses: np.ndarray  # shape=(POINTS, n), the variances before anything was measured there
    line: Line
    size: np.ndarray  # shape=(n,), int64: the size in force; 0 before the first step
    time: np.ndarray  # shape=(n,), its relative time
    variance: np.ndarray  # shape=(n,), of that
    place: np.ndarray  # shape=(n,), int64: its point; where there is none as yet, where one may be

    @classmethod
    def init(cls, n_workers: int) -> Shape:
        """Return the state without points. The first size that is seen has the time 1, by definition."""
        points, one, none = np.ones((POINTS, n_workers)), np.ones(n_workers), np.zeros(n_workers, np.int64)
        free = np.full_like(points, np.inf)
        shape = cls(points, points, free, free, Line(one, one, one, one, one), none, one, 0 * one, none)
        return shape.fitted(none > 0)

    @property
    def smallest(self) -> np.ndarray:
        """Smallest sizes with known times; shape=(n,), infinite if there are none."""
        return np.where(np.isfinite(self.variances), self.sizes, np.inf).min(axis=0)

    def _nearest(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the point nearest to each worker's size, its relative distance, and the index for a new point."""
        distance = np.where(np.isfinite(self.variances), np.abs(self.sizes / np.maximum(sizes, 1) - 1), np.inf)
        nearest = np.argmin(distance, axis=0)
        return nearest, distance[nearest, np.arange(len(sizes))], np.argmax(distance, axis=0)

    def variance_at(self, sizes: np.ndarray) -> np.ndarray:
        """Return the variance of the line's relative times at sizes; shape=(n,)."""
        nearest, off, _ = self._nearest(sizes)
        return self.variances[nearest, np.arange(len(sizes))] + self.line.variance(np.where(off > SAME, off, 0.0))

    def go_to(self, sizes: np.ndarray, doubted: np.ndarray) -> Shape:
        """Return the state at other sizes, extrapolated along the line from the nearest point.

        Where points are `doubted`, shape=(n,), bool, extrapolates from the last size instead: the points' errors must
        not count as a change of speed.
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
        """Move the times of the sizes in force by their share of a relative surprise.

        Args:
          surprise, share: shape=(n,); a share of 0 where there is none.
          first: shape=(n,), bool: whose first step this is.
          doubted: shape=(n,), bool: whose points are believed less from step to step.
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
            # Where points are doubted nothing is learnt of the size: the level takes it all.
            variance=np.where(doubted, 0.0, self.variance * left),
        ).fitted(doubted)

    def fitted(self, doubted: np.ndarray) -> Shape:
        """Return the state with lines fitted to the points; where points are doubted, nearly the prior's line."""
        sizes, times = self.sizes, self.times
        # What was measured there, without what lines said before.
        weights = 1 / np.maximum(self.variances, LEAST_VARIANCE) - 1 / np.maximum(self.guesses, LEAST_VARIANCE)
        weights = np.maximum(weights, 0.0)
        known = weights * KNOWN > 1
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
        prior = 1 / PRIOR_ELASTICITY_SD**2
        wx = weights * x * np.where(doubted, MISFIT**2, 1.0)
        information = (wx * x).sum(axis=0) + prior
        elasticity = ((wx * y).sum(axis=0) + prior) / information
        elasticity = np.minimum(np.maximum(elasticity, 0.0), 1.0)
        return self._replace(line=Line(floor, center, middle, elasticity, 1 / np.sqrt(information)))


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    total = weights.sum(axis=0)
    return np.where(total > 0, (values * weights).sum(axis=0) / np.where(total > 0, total, 1.0), 1.0)
