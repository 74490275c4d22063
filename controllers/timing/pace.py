"""The pace of workers: how long a step takes now, relative to its length at the same size at another time.

A pace is mostly constant: then the mean of all steps is the best estimate. Sometimes it drifts: then the mean's errors
have one sign, and a mean of the latest steps with a trend is used. Rarely it jumps: a deviation that noise cannot
explain restarts both. If the next step shows that it was only a pause, the jump is undone, and later jumps are
distrusted. Paces are logarithms of seconds; errors are relative, so that estimates are means of seconds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

AHEAD = 2  # steps from the measured step to the step that a decision affects
MEMORY = 100  # steps in the mean, at most
CATCH_UP = 10  # steps in the mean while the pace drifts, so that it is close when the drift ends
RECENT, TREND = 0.3, 0.03  # gains of the latest steps' mean and of its trend (Holt's double exponential smoothing)
LAG = 0.1  # gain of the smoothed error of the mean …
DRIFTS, STAYS = 5.0, 1.5  # … and its standard deviations at which a drift begins, and ends
HOLD = 30  # steps without such an error after which a drift has ended
SURE = 4.5  # standard deviations of a jump
LASTING = 0.6  # factor of the distrust in jumps after one that lasts, and of the trust after one that does not
JUMP_MEMORY, RESTLESS = 100.0, 0.015  # steps; jumps per step above which a pace counts as unsettled
NOISE_MEMORY = 64  # steps
FIRST_NOISE, LEAST_NOISE = 0.08, 0.003


class Pace(NamedTuple):
    """Estimates of n workers' paces. A pytree of arrays of shape=(n,), except where noted; methods return a new one."""

    mean: np.ndarray  # mean since the last jump, a logarithm of seconds; NaN until measured
    steps: np.ndarray  # number of steps in it, without forgetting
    lag: np.ndarray  # smoothed relative error of the mean
    drifting: np.ndarray  # steps for which `recent` and `trend` are still used instead of the mean
    recent: np.ndarray  # mean of the latest steps
    trend: np.ndarray  # its increase per step
    noise: np.ndarray  # relative standard deviation of one step's seconds
    differences: np.ndarray  # number of differences from which the noise was learned
    latest: np.ndarray  # the latest step; NaN before the first
    before: np.ndarray  # shape=(3, n): `mean`, `recent` and `steps` before a jump in the latest step; NaN without one
    jumping: np.ndarray  # jumps that lasted, per step
    trust: np.ndarray  # shape=(), from 0 to 1: trust in jumps, by whether the latest ones lasted

    @classmethod
    def init(cls, n_workers: int) -> Pace:
        """Return the state without measurements."""
        unknown, none = np.full(n_workers, np.nan), np.zeros(n_workers)
        noise, before = np.full(n_workers, FIRST_NOISE), np.full((3, n_workers), np.nan)
        return cls(unknown, none, none, none, unknown, none, noise, none, unknown, before, none, np.asarray(1.0))

    def after(self, steps: int) -> np.ndarray:
        """Return the pace predicted for `steps` steps later; shape=(n,), NaN if never measured."""
        return np.where(self.drifting > 0, self.recent + steps * self.trend, self.mean)

    @property
    def variance(self) -> np.ndarray:
        """Relative variance of the estimated pace due to noise; shape=(n,)."""
        of_mean = 1 / np.clip(self.steps, 1, MEMORY)
        return self.noise**2 * np.where(self.drifting > 0, np.maximum(of_mean, RECENT / (2 - RECENT)), of_mean)

    @property
    def unsettled(self) -> np.ndarray:
        """Whether a worker's pace drifts or jumps repeatedly; shape=(n,)."""
        return (self.drifting > 0) | (self.jumping > RESTLESS)

    @property
    def jumped(self) -> np.ndarray:
        """Which workers jumped in the latest step; shape=(n,)."""
        return np.isfinite(self.before[0])

    def without_jumps(self, where: np.ndarray) -> Pace:
        """Return the state with some of the latest step's jumps undone."""
        mean, recent, steps = np.where(where, self.before, (self.mean, self.recent, self.steps))
        return self._replace(mean=mean, recent=recent, steps=steps)

    def with_longer_means(self, ratio: float) -> Pace:
        """Return the state for future times that are means over `ratio` times as many steps as so far."""
        steps = np.where(self.steps > 0, np.maximum(self.steps / ratio, 1.0), 0.0)
        return self._replace(noise=np.maximum(self.noise / np.sqrt(ratio), LEAST_NOISE), steps=steps)

    def judge(self, step: np.ndarray) -> Pace:
        """Return the state without jumps of the previous step that were only pauses; `step` as for `learn`."""
        judged = self.jumped & np.isfinite(step)
        if not judged.any():
            return self
        over = judged & (np.abs(step - self.before[0]) < np.abs(step - self.mean))
        lasts = judged & ~over
        return self.without_jumps(over)._replace(
            before=np.where(judged, np.nan, self.before),
            trust=np.asarray(1 - (1 - self.trust * LASTING ** over.sum()) * LASTING ** lasts.sum()),
            jumping=self.jumping + lasts / JUMP_MEMORY,
        )

    def jumps(self, surprise: np.ndarray, unknown: np.ndarray | float = 0.0) -> np.ndarray:
        """Return which relative deviations are jumps: noise, with an additional variance, cannot explain them."""
        return surprise**2 > SURE**2 * (self.noise**2 + self.variance + unknown)

    def learn(self, step: np.ndarray, jump: np.ndarray) -> Pace:
        """Return the state after a step, from its times, logarithms, NaN where unknown, and which of them are jumps."""
        seen = np.isfinite(step)
        fresh = jump | (seen & (self.steps == 0))
        follows = seen & ~fresh
        steps, foreseen = np.where(fresh, 1, self.steps + seen), self.recent + self.trend
        error, of_recent = (np.where(follows, np.expm1(step - e), 0.0) for e in (self.mean, foreseen))
        drifting = self.drifting > 0
        gain = 1 / np.clip(steps, 1, np.where(drifting, CATCH_UP, MEMORY))
        limit = 3 * self.noise
        lag = np.where(fresh, 0.0, self.lag + LAG * (np.clip(error, -limit, limit) - self.lag) * seen)
        late = np.abs(lag) / (self.noise * np.sqrt(LAG / (2 - LAG)))
        return self._replace(
            mean=np.where(fresh, step, self.mean + gain * error),
            steps=steps,
            lag=lag,
            drifting=np.where(late > np.where(drifting, STAYS, DRIFTS), HOLD, np.maximum(self.drifting - seen, 0)),
            recent=np.where(fresh, step, np.where(seen, foreseen, self.recent) + np.maximum(gain, RECENT) * of_recent),
            trend=np.where(fresh, 0.0, self.trend + TREND * of_recent),
            before=np.where(jump, (self.mean, self.recent, self.steps), np.where(seen, np.nan, self.before)),
            jumping=np.where(seen, self.jumping * (1 - 1 / JUMP_MEMORY), self.jumping),
        )

    def learn_noise(self, step: np.ndarray, latest: np.ndarray, usable: np.ndarray) -> Pace:
        """Return the state with the noise updated from the difference of two steps, which drift hardly affects.

        `latest`: the times to compare the next step with, logarithms; `usable`: where only noise makes steps differ.
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
