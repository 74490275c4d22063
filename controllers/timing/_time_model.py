"""Model of a worker's step time on any batch size, learned from its steps.

A step takes `exp(pace) * max(floor, slope * b + intercept)` seconds. The *pace*, the machine's present speed, may
change at any step, and affects all sizes equally (`pace.py`). The *line* hardly ever changes: it is the least-squares
fit to the relative times of a few sizes, with a prior towards times proportional to the batch. An unexpected time at a
known size belongs to the pace; one at a new size is divided between both, in proportion to their uncertainty. Points
are forgotten when the pace jumps, and while it drifts: a controller then changes sizes so that times stay constant.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from ._batch_time import BatchTime
from .pace import AHEAD, Pace

POINTS = 8  # sizes of each worker to which its line is fitted
SAME = 0.02  # sizes with a smaller relative difference are one point
ARRIVAL = 15  # steps at a new size that update its point; later steps update the pace
MISFIT = 0.02  # relative standard deviation of true times from the fitted line
PRIOR_ELASTICITY_SD = 0.5  # around 1: time proportional to the batch
CURVATURE = 0.5  # standard deviation of the elasticity's change when the size doubles
FLAT_SPAN, FLAT_RISE = 1.5, 1.08  # a floor: 1.5 times the examples in less than 1.08 times the time
KNOWN = 1 / 0.04**2  # least precision of a point that is used to detect a floor: a standard error of 4 %
MOST_PRECISE = 1e4  # a standard error of 1 %
FADE, JUMP_FADE = 1.02, 4.0  # by which points are less precise: after each step with an unsettled pace; after a jump
_PLACES = np.arange(POINTS)[:, None]


class TimeModel(NamedTuple):
    """Model of n workers' step times. A pytree of arrays; methods return a new one."""

    pace: Pace
    points: np.ndarray  # shape=(3, POINTS, n): sizes, relative times, and their precision (0 for an unused point)
    line: BatchTime  # relative times, by size
    elasticity_sd: np.ndarray  # shape=(n,), standard deviation of the line's elasticity, from 0 (constant) to 1
    sizes: np.ndarray  # shape=(n,), int64: the sizes of the latest step; 0 before the first
    time: np.ndarray  # shape=(n,), the relative time at these sizes
    variance_of_time: np.ndarray  # shape=(n,), its relative variance
    place: np.ndarray  # shape=(n,), int64: index of these sizes' points; for new sizes, of the point to replace
    stay: np.ndarray  # shape=(n,), int64: steps seen since the size changed, or the pace jumped
    largest: np.ndarray  # shape=(n,), int64: the largest size ever measured
    left_out: np.ndarray  # shape=(n,), bool: whether the latest step was ignored
    waiting: np.ndarray  # shape=(), int64: steps since `decided`

    @classmethod
    def init(cls, n_workers: int) -> TimeModel:
        """Return the state without measurements. The first size of a worker has the relative time 1, by definition."""
        none, zeros, ones = np.zeros(n_workers, np.int64), np.zeros(n_workers), np.ones(n_workers)
        line = BatchTime(ones, zeros, zeros)
        points = np.zeros((3, POINTS, n_workers))
        prior = np.full(n_workers, PRIOR_ELASTICITY_SD)
        model = Pace.init(n_workers), points, line, prior, none, ones, zeros, none, none, none, none > 0
        return cls(*model, np.asarray(0))

    @property
    def measured(self) -> np.ndarray:
        """Whether each worker was ever measured; shape=(n,)."""
        return self.pace.steps > 0

    @property
    def present(self) -> np.ndarray:
        """Expected seconds of the next step at the latest sizes; shape=(n,), NaN for workers never measured."""
        return np.exp(self.pace.after(AHEAD)) * self.time

    @property
    def smallest(self) -> np.ndarray:
        """Smallest sizes of the points; shape=(n,), infinite if there are none."""
        sizes, _, precision = self.points
        return np.where(precision > 0, sizes, np.inf).min(axis=0)

    def fit(self) -> BatchTime:
        """Return the expected seconds of the next step for any size; NaN for workers never measured."""
        level = self.present / self.line(self.sizes)
        return BatchTime(*(level * part for part in self.line))

    def of(self, workers: np.ndarray) -> TimeModel:
        """Return the model of some workers, given by their indices."""
        if len(workers) == len(self.stay):
            return self
        return jax.tree.map(lambda part: part[..., workers] if np.ndim(part) else part, self)

    def variance(self, sizes: np.ndarray) -> np.ndarray:
        """Return the relative variance of the predictions of `fit` at `sizes`, shape=(n,)."""
        noise = np.maximum(self.pace.noise, MISFIT) ** 2
        pace = self.pace.variance * noise / self.pace.noise**2
        if not np.array_equal(sizes, self.sizes):
            return pace + self._from_points(sizes)[1]
        # The time at a measured size is better known than its division into line and pace.
        return np.minimum(pace + self.variance_of_time, noise / np.maximum(self.stay, 1))

    def observe(self, sizes: np.ndarray, seconds: np.ndarray) -> TimeModel:
        """Return the model after a step.

        The first time at a new size is ignored if it is unexpectedly long: it may include the cost of the change.

        Args:
          sizes: int, shape=(n,): the sizes at which `seconds` were measured; 0 for workers without examples.
          seconds: shape=(n,). Values that are not positive numbers count as unknown.
        """
        took = (sizes > 0) & (seconds > 0) & (seconds < np.inf)
        sizes = np.where(sizes > 0, sizes, np.maximum(self.sizes, 1)).astype(np.int64)
        measured, changed = self.measured, sizes != self.sizes
        model = self._at(sizes) if changed.any() else self
        step = np.log(np.where(took, seconds, np.nan) / model.time)
        pace, unknown = model.pace.judge(step), model.variance_of_time
        surprise = np.expm1(step - pace.after(1))
        jump = pace.jumps(surprise, unknown)
        new = changed & (unknown > pace.noise**2)
        left_out = ~self.left_out & ((changed & ~measured) | (new & jump & (surprise > 0)))
        step, jump = np.where(left_out, np.nan, step), jump & ~left_out
        seen = np.isfinite(step)
        stay = np.where(changed | jump, 0, self.stay)
        # The line's share of the deviation; the rest belongs to the pace.
        informative = seen & measured & ~jump & ~pace.unsettled & (stay < ARRIVAL)
        share = np.where(informative, unknown / (pace.noise**2 + pace.variance + unknown), 0.0)
        deviation = share * np.where(informative, surprise, 0.0)
        rest = step - np.log1p(deviation)
        model = model._replace(
            pace=pace.learn_noise(step, rest, ~new).learn(rest, jump),
            time=model.time * (1 + deviation),
            variance_of_time=np.where(seen & pace.unsettled, 0.0, unknown * (1 - share)),
            stay=stay + seen,
            largest=np.where(seen, np.maximum(self.largest, sizes), self.largest),
            left_out=left_out,
            waiting=self.waiting + seen.any(),
        )
        first = seen & ~measured
        doubted = seen & pace.unsettled
        lasts = pace.jumping > self.pace.jumping  # a jump in the step before was no pause
        forgotten = np.where(lasts, JUMP_FADE, np.where(doubted, FADE, 1.0))
        if not (first.any() or informative.any() or (forgotten > 1).any()):
            return model
        gained = np.where(first, MOST_PRECISE, _precision(model.variance_of_time) - _precision(unknown))
        return model._fitted(first | informative, gained, forgotten, doubted)

    def _from_points(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the relative times at sizes, extrapolated along the line from the nearest points, their relative
        variances, and the indices of the points; each of shape=(n,).
        """
        every = np.arange(len(sizes))
        known, times, precision = self.points
        distance = np.where(precision > 0, np.abs(known / np.maximum(sizes, 1) - 1), np.inf)
        nearest = np.argmin(distance, axis=0)
        off, there = distance[nearest, every], known[nearest, every]
        new, same = np.isinf(off), off <= SAME
        time = np.where(new, 1.0, times[nearest, every] * self.line(sizes) / self.line(np.where(new, sizes, there)))
        off = np.where(new | same, 0.0, off)
        variance = np.where(new, 0.0, 1 / np.maximum(precision[nearest, every], 1.0) + self._extrapolation(off))
        return time, variance, np.where(same, nearest, np.argmax(distance, axis=0))

    def _extrapolation(self, off: np.ndarray) -> np.ndarray:
        """Return the relative variance `off` the known sizes, relatively."""
        return (off * (self.elasticity_sd + CURVATURE * np.minimum(off, 1))) ** 2

    def _at(self, sizes: np.ndarray) -> TimeModel:
        """Return the state at other sizes. An unsettled pace is extrapolated from the last size, not from points."""
        time, variance, place = self._from_points(sizes)
        along = self.pace.unsettled & (self.sizes > 0)
        last = np.where(along, self.sizes, sizes)
        time = np.where(along, self.time * self.line(sizes) / self.line(last), time)
        variance = np.where(along, self.variance_of_time + self._extrapolation(np.abs(last / sizes - 1)), variance)
        return self._replace(sizes=sizes, time=time, variance_of_time=variance, place=place)

    def _fitted(
        self, measured: np.ndarray, gained: np.ndarray, forgotten: np.ndarray, doubted: np.ndarray
    ) -> TimeModel:
        """Return the state with points of the present sizes, where `measured`, and lines fitted to all points.

        `gained`: precision of the measurements; `forgotten`: by what that of all points is divided; shapes=(n,).
        """
        sizes, _, precision = self.points
        here = (self.place == _PLACES) & measured
        known = (precision > 0) & (np.abs(sizes - self.sizes) <= SAME * self.sizes)
        new_precision = np.minimum(np.where(known, precision, 0.0) + gained, MOST_PRECISE)
        updates = (np.where(known, sizes, self.sizes), self.time, new_precision)
        points = np.where(here, np.broadcast_arrays(*updates), self.points)
        points[2] = np.where(points[2] > 0, np.maximum(points[2] / forgotten, 1.0), 0.0)
        line, elasticity_sd = fit_lines(points[0], points[1], points[2], doubted)
        return self._replace(points=points, line=line, elasticity_sd=elasticity_sd)


def fit_lines(
    sizes: np.ndarray, times: np.ndarray, precision: np.ndarray, doubted: np.ndarray
) -> tuple[BatchTime, np.ndarray]:
    """Fit lines with floors to points, shape=(points, n), with a prior towards times proportional to the size.

    `doubted`: shape=(n,), bool: the workers whose line stays close to the prior. A floor is still believed. Returns the
    lines, and the standard deviations of their elasticities; shape=(n,).
    """
    known = precision > KNOWN
    low = known & (times <= FLAT_RISE * np.where(known, times, np.inf).min(axis=0))
    largest_low = np.where(low, sizes, 0.0).max(axis=0)
    flat = largest_low >= FLAT_SPAN * np.where(low, sizes, np.inf).min(axis=0)
    floor = np.where(flat, _mean(times, np.where(low, precision, 0.0)), 0.0)
    # With a floor, the line is fitted to the points above it, or else starts at the last point on the floor.
    above = known & ~low
    above = np.where(above.any(axis=0), above, low & (sizes >= largest_low))
    weights = np.where(flat & ~above, 0.0, precision)
    center, middle = _mean(sizes, weights), _mean(times, weights)
    x, y = sizes / center - 1, times / middle - 1
    prior = 1 / PRIOR_ELASTICITY_SD**2
    weighted = weights * x * np.where(doubted, MISFIT**2, 1.0)
    information = (weighted * x).sum(axis=0) + prior
    elasticity = np.clip(((weighted * y).sum(axis=0) + prior) / information, 0.0, 1.0)
    return BatchTime(elasticity * middle / center, (1 - elasticity) * middle, floor), 1 / np.sqrt(information)


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    total = weights.sum(axis=0)
    return np.where(total > 0, (values * weights).sum(axis=0) / np.where(total > 0, total, 1.0), 1.0)


def _precision(variance: np.ndarray) -> np.ndarray:
    return 1 / np.maximum(variance, 1 / MOST_PRECISE)
