"""The level of a machine's step times: its current speed relative to its speed at other times.

A level is mostly constant, and then the mean of all steps is the best estimate. Sometimes it drifts, and only the
latest steps are relevant; rarely it jumps. Several estimates are therefore kept: means with long and short memory, and
one that follows a trend. The one that predicted the latest steps best is used, with a preference for the longest mean.
A deviation that noise cannot explain is a jump, from which all estimates restart. If the next step shows that it was
only a pause, the old level is restored, and later jumps need larger deviations.

Levels are logarithms of seconds; errors are relative, so an estimate is a mean of seconds. Arrays hold all workers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# The gain of each estimate, and of its trend (Holt's double exponential smoothing).
GAINS = np.array([0.01, 0.06, 0.25, 0.7, 0.3])[:, None]
TREND_GAINS = np.array([0.0, 0.0, 0.0, 0.0, 0.03])[:, None]
SLOWEST = GAINS[0, 0] / (2 - GAINS[0, 0])  # least variance of the slow mean, relative to one step's
RANKS = np.arange(len(GAINS))[:, None]
LEAVE, RETURN = 12.0, 4.0  # squared errors by which another estimate must beat the slow mean; and then must keep
BEATEN = 20.0  # squared errors by which an estimate must be worse than a faster one to be restarted from it
MEMORY, LEAST_TURNS = 50.0, 5.0  # steps, and decisions, over which estimates are compared
AHEAD = 2  # steps from the measured step to the step that a decision affects
SURE = 4.5  # standard deviations of a jump
LASTING = 0.6  # factor of the distrust in jumps after one that lasts, and of the trust after one that does not
JUMP_MEMORY = 100.0  # steps
RESTLESS = 0.015  # jumps per step above which a speed counts as unsettled: two within half of `JUMP_MEMORY`
NOISE_MEMORY = 64  # steps
FIRST_NOISE, LEAST_NOISE = 0.08, 0.003


class Level(NamedTuple):
    """Estimates of n workers' levels. A pytree of arrays; methods return a new one."""

    estimates: np.ndarray  # shape=(len(GAINS), n), logarithms of seconds; NaN until measured
    trends: np.ndarray  # shape=(len(GAINS), n), increase of the estimates per step
    forecasts: np.ndarray  # shape=(len(GAINS), n), at the last due decision: predicted level of the next step …
    forecast_trends: np.ndarray  # shape=(len(GAINS), n), … and its increase per later step
    missed: np.ndarray  # shape=(len(GAINS), n), sums of the relative errors of `forecasts`; NaN after a jump
    since: np.ndarray  # shape=(n,), number of steps in `missed`
    losses: np.ndarray  # shape=(len(GAINS), n), recent squared means of these errors, in units of their variance
    best: np.ndarray  # shape=(n,), int64: index of the estimate that is used
    steps: np.ndarray  # shape=(n,), number of steps in the slow mean, without forgetting
    before: np.ndarray  # shape=(len(GAINS), n), estimates before a jump in the latest step; NaN without one
    steps_before: np.ndarray  # shape=(n,), `steps` before that jump
    lasting: np.ndarray  # shape=(), from 0 to 1: trust in jumps, by whether the latest ones lasted
    jumping: np.ndarray  # shape=(n,), jumps that lasted, per step
    noise: np.ndarray  # shape=(n,), relative standard deviation of one step's time
    differences: np.ndarray  # shape=(n,), number of differences from which the noise was learned
    latest: np.ndarray  # shape=(n,), the latest step's logarithm; NaN before the first

    @classmethod
    def init(cls, n_workers: int) -> Level:
        """Return the state without measurements."""
        unknown, none = np.full((len(GAINS), n_workers), np.nan), np.zeros(n_workers)
        return cls(
            estimates=unknown,
            trends=np.zeros_like(unknown),
            forecasts=unknown,
            forecast_trends=np.zeros_like(unknown),
            missed=unknown,
            since=none,
            losses=np.zeros_like(unknown),
            best=np.zeros(n_workers, np.int64),
            steps=none,
            before=unknown,
            steps_before=none,
            lasting=np.asarray(1.0),
            jumping=none,
            noise=np.full(n_workers, FIRST_NOISE),
            differences=none,
            latest=unknown[0],
        )

    # --- predictions --------------------------------------------------------------------------------------------------

    def after(self, steps: int) -> np.ndarray:
        """Return the level predicted for `steps` steps later; shape=(n,), logarithms, NaN if never measured."""
        every = np.arange(len(self.best))
        return self.estimates[self.best, every] + steps * self.trends[self.best, every]

    @property
    def variance(self) -> np.ndarray:
        """Relative variance of the estimated level due to noise; shape=(n,)."""
        gain = GAINS[self.best, 0]
        return self.noise**2 * np.maximum(1 / np.maximum(self.steps, 1), gain / (2 - gain))

    @property
    def step_variance(self) -> np.ndarray:
        """Relative variance of a step's predicted time; shape=(n,)."""
        return self.noise**2 + self.variance

    @property
    def unsettled(self) -> np.ndarray:
        """Whether a worker's speed drifts or jumps repeatedly; shape=(n,)."""
        return (self.best > 0) | (self.jumping > RESTLESS)

    def without_latest_jumps(self) -> Level:
        """Return the state with the jumps of the latest step undone."""
        jumped = np.isfinite(self.before[0])
        return self._replace(
            estimates=np.where(jumped, self.before, self.estimates),
            steps=np.where(jumped, self.steps_before, self.steps),
        )

    def with_levels(self, value: np.ndarray, where: np.ndarray) -> Level:
        """Return the state with `value` as the level of workers in the mask `where`; both shape=(n,)."""
        return self._replace(estimates=np.where(where, value, self.estimates), trends=np.where(where, 0.0, self.trends))

    # --- updates ------------------------------------------------------------------------------------------------------

    def with_longer_means(self, ratio: float) -> Level:
        """Return the state for future times that are means over `ratio` times as many steps as so far."""
        noise = np.maximum(self.noise / np.sqrt(ratio), LEAST_NOISE)
        steps, before = (np.where(s > 0, np.maximum(s / ratio, 1.0), s) for s in (self.steps, self.steps_before))
        return self._replace(noise=noise, steps=steps, steps_before=before)

    def judge(self, step: np.ndarray) -> Level:
        """Return the state without jumps in the previous step that were only pauses, by this step's times.

        Args:
          step: the times of this step; shape=(n,), logarithms.
        """
        judged = np.isfinite(self.before[0]) & np.isfinite(step)
        if not judged.any():
            return self
        before = self.before[self.best, np.arange(len(step))]
        over = judged & (np.abs(step - before) < np.abs(step - self.after(1)))
        lasts = judged & ~over
        return self._replace(
            estimates=np.where(over, self.before, self.estimates),
            steps=np.where(over, self.steps_before, self.steps),
            before=np.where(judged, np.nan, self.before),
            lasting=np.asarray(1 - (1 - self.lasting * LASTING ** over.sum()) * LASTING ** lasts.sum()),
            jumping=self.jumping + lasts / JUMP_MEMORY,
        )

    def jumps(self, surprise: np.ndarray, unknown: np.ndarray | float = 0.0) -> np.ndarray:
        """Return which deviations are jumps: noise, with an additional variance `unknown`, cannot explain them.

        Args:
          surprise: relative deviations from the predictions; shape=(n,).
          unknown: additional variance of the predictions; shape=(n,) or a number.
        """
        return surprise**2 > SURE**2 * (self.step_variance + unknown)

    def calm(self, step: np.ndarray, unknown: np.ndarray) -> Level | None:
        """Return the state after an ordinary step, in fewer operations, or `None` if the step is not ordinary.

        A step is ordinary if its times are as predicted on all workers, and all were measured at the same sizes before.
        The result is bitwise equal to that of `judge`, `jumps`, `learn_noise` and `learn`.

        Args:
          step: the times of this step; shape=(n,), logarithms, not NaN.
          unknown: see `jumps`.
        """
        settled, noise = self.before[0], self.noise
        if (
            np.count_nonzero(settled != settled) < len(step)
            or np.count_nonzero(self.best)
            or np.count_nonzero(self.jumping > RESTLESS)
        ):
            return None
        foreseen, square = self.estimates + self.trends, noise**2
        errors = np.expm1(step - foreseen)
        variance = square + square * np.maximum(1 / np.maximum(self.steps, 1), SLOWEST)
        if np.count_nonzero(errors[0] ** 2 > SURE**2 * (variance + unknown)):
            return None
        found = 2 * np.tanh(0.5 * np.abs(step - self.latest)) / 1.128
        weight = np.maximum(1 / (self.differences + 3), 1 / NOISE_MEMORY)
        moved = noise + weight * (np.minimum(found, 4 * noise) - noise)
        steps = self.steps + 1
        return Level(
            estimates=foreseen + np.maximum(GAINS, 1 / steps) * errors,
            trends=self.trends + TREND_GAINS * errors,
            forecasts=self.forecasts + self.forecast_trends,
            forecast_trends=self.forecast_trends,
            missed=self.missed + np.expm1(step - self.forecasts),
            since=self.since + 1,
            losses=self.losses,
            best=self.best,
            steps=steps,
            before=self.before,
            steps_before=self.steps_before,
            lasting=self.lasting,
            jumping=self.jumping * (1 - 1 / JUMP_MEMORY),
            noise=np.maximum(moved, LEAST_NOISE),
            differences=self.differences + 1,
            latest=step,
        )

    def learn(self, step: np.ndarray, jump: np.ndarray, due: bool) -> Level:
        """Return the state after a step.

        Args:
          step: the times of the step; shape=(n,), logarithms, NaN where unknown.
          jump: shape=(n,), bool: which of them are jumps.
          due: whether a decision follows, so that estimates are compared by their predictions of the next steps.
        """
        seen = np.isfinite(step)
        fresh = jump | (seen & (self.steps == 0))
        if seen.all() and not fresh.any():
            level = self._follow(step)
            return level.compared() if due else level
        follows = seen & ~fresh
        foreseen = self.estimates + self.trends
        errors = np.where(follows, np.expm1(step - foreseen), 0.0)
        steps = np.where(fresh, 1, self.steps + seen)
        gains = np.maximum(GAINS, 1 / np.maximum(steps, 1))
        level = self._replace(
            estimates=np.where(fresh, step, np.where(seen, foreseen, self.estimates) + gains * errors),
            trends=np.where(fresh, 0.0, self.trends + TREND_GAINS * errors),
            forecasts=np.where(seen, self.forecasts + self.forecast_trends, self.forecasts),
            missed=np.where(fresh, np.nan, self.missed + np.where(follows, np.expm1(step - self.forecasts), 0.0)),
            since=self.since + follows,
            steps=steps,
            before=np.where(jump, self.estimates, np.where(seen, np.nan, self.before)),
            steps_before=np.where(jump, self.steps, self.steps_before),
            jumping=np.where(seen, self.jumping * (1 - 1 / JUMP_MEMORY), self.jumping),
        )
        return level.compared() if due else level

    def _follow(self, step: np.ndarray) -> Level:
        """Return the same as `learn`, in fewer operations, for a step with all times known and without jumps."""
        foreseen = self.estimates + self.trends
        errors = np.expm1(step - foreseen)
        steps = self.steps + 1
        return self._replace(
            estimates=foreseen + np.maximum(GAINS, 1 / np.maximum(steps, 1)) * errors,
            trends=self.trends + TREND_GAINS * errors,
            forecasts=self.forecasts + self.forecast_trends,
            missed=self.missed + np.expm1(step - self.forecasts),
            since=self.since + 1,
            steps=steps,
            before=np.full_like(self.before, np.nan),
            jumping=self.jumping * (1 - 1 / JUMP_MEMORY),
        )

    def compared(self) -> Level:
        """Return the state with the best estimates selected, and with new predictions until the next decision."""
        since, estimates, steps = self.since, self.estimates, self.steps
        judged = (since > 0) & np.isfinite(self.missed[0])
        kept = 1 - 1 / np.maximum(MEMORY / np.maximum(since, 1), LEAST_TURNS)
        scaled = np.minimum(self.missed**2 / (np.maximum(since, 1) * self.noise**2), 9)
        losses = np.where(judged, self.losses * kept + scaled, self.losses)
        margin = np.where(self.best > 0, RETURN, LEAVE)
        best = np.argmin(losses + margin * (RANKS > 0), axis=0)
        if best.any():
            every = np.arange(len(best))
            beaten = (best > RANKS) & (losses > losses[best, every] + BEATEN)
            estimates = np.where(beaten, estimates[best, every], estimates)
            steps = np.where(beaten.any(axis=0), np.minimum(steps, 1 / GAINS[best, 0]), steps)
        return self._replace(
            estimates=estimates,
            forecasts=estimates + self.trends,
            forecast_trends=self.trends,
            missed=np.zeros_like(self.missed),
            since=np.zeros_like(since),
            losses=losses,
            best=best,
            steps=steps,
        )

    def learn_noise(self, step: np.ndarray, latest: np.ndarray, usable: np.ndarray) -> Level:
        """Return the state with the noise updated from the difference of this step and the previous one.

        Such differences are nearly unaffected by drift, and a jump affects only one of them.

        Args:
          step: the times of this step; shape=(n,), logarithms, NaN where unknown.
          latest: the times to compare the next step with; shape=(n,), logarithms.
          usable: shape=(n,), bool: whether only noise makes the two steps differ.
        """
        # 2 |a - b| / (a + b); the mean of |a - b| is 1.128 for two normal numbers of deviation 1.
        found = 2 * np.tanh(0.5 * np.abs(step - self.latest)) / 1.128
        usable = usable & np.isfinite(found)
        weight = np.maximum(1 / (self.differences + 3), 1 / NOISE_MEMORY)
        moved = self.noise + weight * (np.minimum(found, 4 * self.noise) - self.noise)
        return self._replace(
            noise=np.where(usable, np.maximum(moved, LEAST_NOISE), self.noise),
            differences=self.differences + usable,
            latest=np.where(np.isnan(step), self.latest, latest),
        )
