"""What a worker's step would take on another batch size: learnt from the steps it does.

Two things are learnt of each worker, and kept apart because they change in different ways. Its *shape*, how time goes
with the batch size, hardly ever changes; it is seen only when the size does. Its *level*, how fast the machine is just
now, may change at any step, for all sizes alike. So a surprise at a size that is known is the level's; one at a new
size is the shape's, as far as shapes reach (from flat to proportional, less what is known already). What is more than
noise and shape can explain is a step change of speed: the level follows it at once, and the shape stays. If it was a
pause and no change, the next step says so: then the level is what it was, and surprises are believed less readily.

The shape is a few points (size, relative time), through which goes `max(floor, slope * b + intercept)`, fitted by
weighted least squares with a prior towards proportional time, so that one point makes a line through the origin (the
one-point rule), and two that noise cannot tell apart do not make a wild one. The level is a mean that forgets
exponentially: slowly at first, and faster while what it says is off to one side again and again, as it is when speeds
drift. All workers are in arrays: no loop over them.
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
LEAN_MEMORY = 10  # digests over which errors are looked at for a side that they lean to …
LEANING = 0.7  # … and by how much, in standard deviations of one
FADE = 0.6  # of the steps that a level remembers is left at each digest while it leans
JUMPS_MEMORY = 100  # digests
RESTLESS = 0.015  # jumps per digest: two in half of that
GROWTH = 1.1  # … and grows by at each digest, once it does not, until it is on the way to all of them
UNSETTLED = 0.3  # of the steps since the last jump, or less, is what a level remembers that drifts for long
SHAPE_FADE = 0.95  # of a point's weight is left at each digest meanwhile
LASTED = 3  # steps that make a surprise more than a pause
NOISE_MEMORY = 32  # steps
LEAST_NOISE = 0.02  # relative; also covers that time is not quite a line
PRIOR_ELASTICITY_SD = 0.5  # around 1: time proportional to the batch
CURVATURE = 0.5  # how much the elasticity may differ at twice the size
FLAT_SPAN, FLAT_RISE = 1.5, 1.08  # 1.5 times the examples in less than 1.08 times the time: a floor
PLACES = np.arange(POINTS)[:, None]


class TimeModel(NamedTuple):
    """What is known of n workers' step times. A pytree of arrays; methods return a new one."""

    sizes: np.ndarray  # shape=(n,), int64: the sizes that the window was measured at; 0 before the first step
    window: np.ndarray  # shape=(WINDOW, n), seconds of the latest steps, oldest first; NaN where there are none
    level: np.ndarray  # shape=(n,), seconds for a relative time of 1; NaN until measured
    present: np.ndarray  # shape=(n,), seconds at the sizes that were digested last
    steps: np.ndarray  # shape=(n,), how many steps' worth the level is known to
    age: np.ndarray  # shape=(n,), for how many steps the level has not jumped, up to MEMORY
    lean: np.ndarray  # shape=(n,), mean of the level's latest errors, in standard deviations of each
    restless: np.ndarray  # shape=(n,), jumps of the level per digest, lately
    level_before: np.ndarray  # shape=(n,), the level before it jumped in the last digest; NaN if it did not
    steps_before: np.ndarray  # shape=(n,), to which that was known
    lasting: np.ndarray  # shape=(), from 0 to 1: how readily a jump is believed: whether the latest ones lasted
    noise: np.ndarray  # shape=(n,), relative standard deviation of one step's time
    differences: np.ndarray  # shape=(n,), of how many neighbouring steps that was learnt
    latest: np.ndarray  # shape=(n,), seconds of the latest step at these sizes; NaN where there is none
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
            present=np.full(n, np.nan),
            steps=np.zeros(n),
            age=np.zeros(n),
            lean=np.zeros(n),
            restless=np.zeros(n),
            level_before=np.full(n, np.nan),
            steps_before=np.zeros(n),
            lasting=np.asarray(1.0),
            noise=np.full(n, 0.08),
            differences=np.zeros(n),
            latest=np.full(n, np.nan),
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
    def smallest(self) -> np.ndarray:
        """The smallest sizes of which times are kept; shape=(n,), infinite where there are none."""
        return np.where(self.point_weights > 0, self.point_sizes, np.inf).min(axis=0)

    @property
    def waiting(self) -> int:
        """Steps in the window: of the worker of which there are most."""
        return int(np.isfinite(self.window).sum(axis=0).max())

    @property
    def unsettled(self) -> np.ndarray:
        """Whose speeds drift, or jump again and again; shape=(n,)."""
        return (self.steps < UNSETTLED * self.age) | (self.restless > RESTLESS)

    @property
    def doubtful(self) -> bool:
        """Whether the last digest took for a change of speed what may be a pause: lately, pauses they were."""
        return bool(self.lasting < 0.5 and np.isfinite(self.level_before).any())

    def observe(self, sizes: np.ndarray, seconds: np.ndarray) -> TimeModel:
        """Take in one step.

        The first time at a new size is left out if it is surprisingly long: it holds what changing cost. (Not twice in
        a row: then it is slow.) What is not a positive number is missing.

        Args:
          sizes: int, shape=(n,): the sizes that `seconds` were measured at.
          seconds: shape=(n,).
        """
        model = self
        seconds = np.where((seconds > 0) & (seconds < np.inf), seconds, np.nan)
        changed = sizes != model.sizes
        if changed.any():
            left_out_before = np.isnan(model.latest) & (model.sizes > 0)  # it goes on, so it is its speed
            model = model.digest()._replace(sizes=np.array(sizes, np.int64))
            most = model.fit()(sizes) * (1 + SURE * np.hypot(model.deviation(sizes), model.noise))
            seconds = np.where(changed & ~left_out_before & ~(seconds <= most), np.nan, seconds)
            model = model._replace(latest=np.where(changed, np.nan, model.latest))
        return model._learn_noise(seconds)._replace(window=np.concatenate([model.window[1:], seconds[None]]))

    def _learn_noise(self, seconds: np.ndarray) -> TimeModel:
        """From differences of neighbouring steps: a change of speed is in one of them, a drift hardly in any."""
        found = np.abs(np.log(seconds / self.latest)) / 1.128  # the mean of |a - b| for two normal numbers
        usable = np.isfinite(found)
        weight = np.maximum(1 / (self.differences + 3), 1 / NOISE_MEMORY)
        moved = self.noise + weight * (np.minimum(found, 6 * self.noise) - self.noise)
        return self._replace(
            noise=np.where(usable, moved, self.noise),
            differences=self.differences + usable,
            latest=np.where(np.isnan(seconds), self.latest, seconds),
        )

    def digest(self) -> TimeModel:
        """Turn the window into what is known, and empty it."""
        mean, count = _summarise(self.window, self.noise)
        seen = count > 0
        if not seen.any():
            return self
        noise, every = self.noise, np.arange(len(count))
        first = seen & ~self.measured
        known = self.point_weights > 0
        distance = np.where(known, np.abs(self.point_sizes / np.maximum(self.sizes, 1) - 1), np.inf)
        nearest = np.argmin(distance, axis=0)
        off = np.where(known[0], distance[nearest, every], 0.0)  # the first place is taken first
        same = ~first & (off <= SAME)

        # How surprising is the mean, and by what may the surprise be explained? Variances are relative.
        relative, elasticity_sd = self._expect(nearest, known_size=bool((same | ~seen | first).all()))
        level, steps, lasting = self._was_it_a_pause(mean / relative, seen)
        surprise = np.where(seen & ~first, mean / (level * relative) - 1, 0.0)
        of_level = noise**2 / np.maximum(steps, 1)
        of_point = noise**2 / np.maximum(self.point_weights[nearest, every], 1)
        of_shape = of_point if same.all() else np.where(same, of_point, _of_shape(off, elasticity_sd))
        # While speeds drift or jump, a controller makes sizes follow, so that times stay as they are: whoever learnt
        # shapes from that would find them flat.
        unsettled = self.unsettled
        of_shape = of_shape * ~unsettled
        variance = noise**2 / np.maximum(count, 1) + np.where(first, 0.0, of_level + of_shape)
        jump = surprise**2 > SURE**2 * variance

        # The level's share of it moves the level; the rest is the point's.
        share = np.where(jump, 1.0, np.where(first, 0.0, of_level / variance))
        level_before, steps_before = np.where(jump, level, np.nan), steps
        level = np.where(first, mean, level * (1 + share * surprise))
        error = np.minimum(np.maximum(surprise / np.sqrt(variance), -3), 3)
        lean = np.where(jump, 0.0, self.lean + seen * (error - self.lean) / LEAN_MEMORY)
        grown = np.where(steps < 0.5 * self.age, np.minimum(GROWTH * steps, steps + count), steps + count)
        leaning = seen & (np.abs(lean) > LEANING)
        new_weight = np.where(first, count, 1 / (1 / np.maximum(count, 1) + 1 / np.maximum(steps, 1)))
        steps = np.where(leaning, np.maximum(FADE * steps, 1), np.minimum(grown, MEMORY))
        steps = np.where(first | jump, count, steps)
        refined = self.point_times[nearest, every] * (1 + np.where(jump, 0.0, of_shape / variance) * surprise)
        place = np.where(same, nearest, np.argmax(distance, axis=0))  # a free place, or else the farthest point's
        weights = self.point_weights
        if unsettled.any():  # points that were seen at other times say the less of the shape
            weights = np.where(unsettled & known, np.maximum(SHAPE_FADE * weights, 1e-3), weights)
        # A jump at a new size says nothing about the shape there.
        fresh = np.where(jump | unsettled, np.minimum(new_weight, 1.0), new_weight)
        weight = np.where(same, np.minimum(weights[place, every] + count, 4 * MEMORY), fresh)
        here = (place == PLACES) & seen
        sizes = np.where(here & ~same, self.sizes, self.point_sizes)
        relative = np.where(same, refined, np.where(unsettled, relative, mean / level))
        times = np.where(here, relative, self.point_times)
        weights = np.where(here, weight, weights)
        return self._replace(
            window=np.full_like(self.window, np.nan),
            level=np.where(seen, level, self.level),
            present=np.where(seen, level * relative, self.present),
            steps=np.where(seen, steps, self.steps),
            age=np.where(first | jump, count, np.minimum(self.age + count, MEMORY)),
            lean=lean,
            restless=self.restless + seen * (jump - self.restless) / JUMPS_MEMORY,
            level_before=np.where(seen, level_before, self.level_before),
            steps_before=np.where(seen, steps_before, self.steps_before),
            lasting=lasting,
            largest=np.where(seen, np.maximum(self.largest, self.sizes), self.largest),
            point_sizes=sizes,
            point_times=times,
            point_weights=weights,
        )

    def _was_it_a_pause(self, level_now: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Level and steps, as they were where the last jump has not lasted; and how readily the next is believed."""
        if not (judged := seen & np.isfinite(self.level_before)).any():
            return self.level, self.steps, self.lasting
        over = judged & (np.abs(level_now / self.level_before - 1) < np.abs(level_now / self.level - 1))
        pauses, changes = int(over.sum()), int((judged & ~over).sum())
        lasting = 1 - (1 - self.lasting * 0.6**pauses) * 0.6**changes
        return (
            np.where(over, self.level_before, self.level),
            np.where(over, self.steps_before, self.steps),
            np.asarray(lasting),
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

        How fast the worker is just now is known to its noise over the steps that it was seen in: also if it drifts, for
        then it is known that it is not what it was. Away from sizes that it was seen with, not knowing its shape adds
        to that.
        """
        noise, every = np.maximum(self.noise, LEAST_NOISE), np.arange(len(self.noise))
        distance = np.where(self.point_weights > 0, np.abs(self.point_sizes / np.maximum(sizes, 1) - 1), np.inf)
        nearest = np.argmin(distance, axis=0)
        off, weight = distance[nearest, every], self.point_weights[nearest, every]
        watched = np.where(self.unsettled | (off > SAME), self.age, np.minimum(self.age, weight))
        variance = noise**2 / np.maximum(watched, 1)
        if (off > SAME).any():
            variance = variance + np.where(off > SAME, _of_shape(off, self._line()[-1]), 0.0)
        return np.sqrt(variance)

    def _expect(self, nearest: np.ndarray, known_size: bool) -> tuple[np.ndarray, np.ndarray | float]:
        """Relative times at the window's sizes, from the nearest point on as the line goes; how sure that is."""
        every = np.arange(len(nearest))
        there = self.point_times[nearest, every]
        if known_size:
            return there, 0.0
        floor, center, middle, elasticity, elasticity_sd = self._line()
        line = BatchTime(elasticity * middle / center, (1 - elasticity) * middle, floor)
        return there * line(self.sizes) / line(self.point_sizes[nearest, every]), elasticity_sd

    def _line(self) -> tuple[np.ndarray, ...]:
        """Floor, centre (size, relative time), elasticity at the centre and its standard deviation; each shape=(n,)."""
        sizes, times, weights = self.point_sizes, self.point_times, self.point_weights
        known = weights > 0.25 * np.minimum(weights.max(axis=0), 1.0)  # and not faded
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
        precision = 1 / np.where(self.unsettled, 1.0, np.maximum(self.noise, LEAST_NOISE)) ** 2
        prior = 1 / PRIOR_ELASTICITY_SD**2
        wx = weights * x
        information = precision * (wx * x).sum(axis=0) + prior
        elasticity = (precision * (wx * y).sum(axis=0) + prior) / information
        elasticity = np.minimum(np.maximum(elasticity, 0.0), 1.0)
        return floor, center, middle, elasticity, 1 / np.sqrt(information)


def _of_shape(off: np.ndarray, elasticity_sd: np.ndarray | float) -> np.ndarray:
    """The relative variance of a time at a size that is relatively so far `off` the nearest one known."""
    return (off * (elasticity_sd + CURVATURE * np.minimum(off, 1))) ** 2


def _mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    total = weights.sum(axis=0)
    return np.where(total > 0, (values * weights).sum(axis=0) / np.where(total > 0, total, 1.0), 1.0)


def _summarise(window: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of each worker's latest steps, and of how many; each shape=(n,).

    Steps far from the median are left out: a pause of the machine is not its speed. And where the later half differs
    from the earlier by more than noise, the speed has changed on the way, and the earlier half is out of date.
    """
    window = window[np.isfinite(window).any(axis=1)]
    if len(window) < LASTED:
        known = np.isfinite(window)
        count = known.sum(axis=0, dtype=np.float64)
        return np.where(known, window, 0.0).sum(axis=0) / np.maximum(count, 1), count
    if len(window) >= 4:
        half = len(window) // 2
        early, late = _median(window[:half]), _median(window[half:])
        tolerance = SURE * 1.25 * 2 / np.sqrt(len(window)) * np.maximum(noise, LEAST_NOISE)
        moved = np.abs(late / early - 1) > tolerance
        if moved.any():
            window = np.concatenate([np.where(moved, np.nan, window[:half]), window[half:]])
    typical = np.abs(window / _median(window) - 1) <= 3.5 * np.maximum(noise, LEAST_NOISE)
    count = typical.sum(axis=0, dtype=np.float64)
    return np.where(typical, window, 0.0).sum(axis=0) / np.maximum(count, 1), count


def _median(values: np.ndarray) -> np.ndarray:
    """Per column, NaN left out; NaN where there is nothing. (np.nanmedian takes twenty times as long, and warns.)"""
    ordered = np.sort(values, axis=0)  # NaN last
    if not np.isnan(ordered[-1]).any():
        return 0.5 * (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2])
    count = np.isfinite(values).sum(axis=0)
    every = np.arange(values.shape[1])
    return 0.5 * (ordered[np.maximum(count - 1, 0) // 2, every] + ordered[count // 2, every])
