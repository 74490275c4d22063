"""Verdicts on splits, from the steps after the decision.

The model of times is fitted to steps before a decision. If these were slow by chance (another process used the core for
some steps), the model predicts a gain that later steps do not show, and the new split may be worse. Steps after a
decision are free of this selection bias, and the model estimates from each of them its time under another split. A
split that turns out worse than the previous one is therefore reverted. From then on, a new split must first pass a
trial: without being used, it must be better in prediction over steps measured after it was proposed, twice as many as
in the last trial. Trials get shorter again as predictions come true.

Of a worker's seconds, only the least ever measured depends on the batch size. The rest counts as stalls, such as
another process's time slices, which are the same under any split.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FIRST_PATIENCE, MOST_PATIENCE = 10, 320  # length of a trial, in steps
LEAST_STEPS, MOST_STEPS = 5, 20  # that a verdict is based on; later steps may have other conditions
SURE = 2.0  # standard errors
LEAST_LOSS = 0.03  # relative; a smaller loss does not count


class Trial(NamedTuple):
    """Comparison of the present split with another one, over the steps since it was proposed. A pytree."""

    sizes: np.ndarray  # shape=(n,), int64: the present split; all 0 if there is no trial
    other: np.ndarray  # shape=(n,), int64: the split that it is compared with
    factors: np.ndarray  # shape=(n,), each worker's predicted seconds with `other`, over those with `sizes`
    least: np.ndarray  # shape=(n,), the least seconds of each worker so far; infinite before the first
    steps: np.ndarray  # shape=(), int64
    seconds: np.ndarray  # shape=(), sum over these steps
    total: np.ndarray  # shape=(), sum over the steps of the seconds that `other` would have saved …
    squares: np.ndarray  # shape=(), … and of their squares

    @classmethod
    def none(cls, n_workers: int) -> Trial:
        """Return the state without a trial."""
        nobody = np.zeros(n_workers, np.int64)
        nothing = np.asarray(0.0)
        least = np.full(n_workers, np.inf)
        return cls(nobody, nobody, np.ones(n_workers), least, np.asarray(0), nothing, nothing, nothing)

    @classmethod
    def of(cls, sizes: np.ndarray, other: np.ndarray, factors: np.ndarray) -> Trial:
        """Start a trial of `sizes` against `other`; `factors`: see the field; shape=(n,)."""
        start = cls.none(len(sizes))
        return start._replace(sizes=sizes.astype(np.int64), other=other.astype(np.int64), factors=factors)

    @property
    def open(self) -> bool:
        """Whether a trial is under way."""
        return bool(self.sizes.any())

    @property
    def gain(self) -> float:
        """The fraction of a step that the other split would have saved, on average."""
        return float(self.total / self.seconds) if self.seconds else 0.0

    @property
    def error(self) -> float:
        """The standard error of `gain`."""
        n, step = max(int(self.steps), 2), float(self.seconds) / max(int(self.steps), 1)
        variance = max(float(self.squares) / n - (float(self.total) / n) ** 2, 0.0)
        return float(np.sqrt(variance / (n - 1))) / step if step else 0.0

    def see(self, sizes: np.ndarray, seconds: np.ndarray) -> Trial:
        """Add a step, if it ran with `sizes` and the seconds of all workers with examples are known."""
        took = self.sizes > 0
        known = (seconds > 0) & (seconds < np.inf)
        if not np.array_equal(sizes, self.sizes) or not known[took].all():
            return self
        least = np.where(took, np.minimum(self.least, seconds), self.least)
        other = seconds[took] + ((self.factors - 1) * np.where(took, least, 0.0))[took]
        step = float(seconds[took].max())
        saved = max(step - float(other.max()), -step)
        return self._replace(
            least=least,
            steps=self.steps + 1,
            seconds=self.seconds + step,
            total=self.total + saved,
            squares=self.squares + saved**2,
        )


class Promises(NamedTuple):
    """The trials under way, and the length of the next one. A pytree; methods return a new one."""

    back: Trial  # of the present split against the previous one
    ahead: Trial  # of the present split against a proposed one
    patience: (
        np.ndarray
    )  # shape=(), int64: length of the trial of a proposed split, in steps; 0 while predictions come true

    @classmethod
    def init(cls, n_workers: int) -> Promises:
        """Return the initial state, in which splits need no trial."""
        return cls(Trial.none(n_workers), Trial.none(n_workers), np.asarray(0))

    def see(self, sizes: np.ndarray, seconds: np.ndarray) -> Promises:
        """Add a step to the trials; `sizes`: int, `seconds`: float, shape=(n,)."""
        if not (self.back.open or self.ahead.open):
            return self
        return self._replace(back=self.back.see(sizes, seconds), ahead=self.ahead.see(sizes, seconds))

    def without_others(self, sizes: np.ndarray, active: np.ndarray, total: int) -> Promises:
        """Return the state without trials that no longer apply: the present split is not `sizes`, its workers are not
        `active`, or its global batch is not `total`.
        """
        if not (self.back.open or self.ahead.open):
            return self

        def still(trial: Trial) -> Trial:
            goes_on = np.array_equal(trial.sizes, sizes) and total == sizes.sum()
            return trial if goes_on and np.array_equal(np.flatnonzero(trial.other), active) else Trial.none(len(sizes))

        return self._replace(back=still(self.back), ahead=still(self.ahead))

    @property
    def broken(self) -> bool:
        """Whether the steps since the decision show that the previous split would have been better."""
        return bool(self.back.steps >= LEAST_STEPS and self.back.gain > max(LEAST_LOSS, SURE * self.back.error))

    def tried_enough(self, gain: float) -> bool:
        """Return whether the proposed split has passed its trial: it was better by more than `gain` for `patience`
        steps, or in fewer steps by a significant margin, which grows with `patience`.
        """
        tried = self.ahead
        clear = tried.steps >= LEAST_STEPS and tried.gain > np.sqrt(self.patience) * tried.error
        long = tried.steps >= self.patience and tried.gain > SURE * tried.error
        return bool(tried.open and tried.gain > gain and (clear or long))

    def judged(self) -> Promises:
        """Return the state after the verdict on the present split, if there are enough steps for one."""
        back = self.back
        if back.steps < LEAST_STEPS:
            return self
        kept = -back.gain > SURE * back.error
        if not kept and not self.broken:
            return self._replace(back=Trial.none(len(back.sizes))) if back.steps >= MOST_STEPS else self
        longer = np.asarray(np.clip(2 * self.patience, FIRST_PATIENCE, MOST_PATIENCE))
        patience = _shorter(self.patience, 2) if kept else longer
        return self._replace(back=Trial.none(len(back.sizes)), patience=patience)

    def dropped(self) -> Promises:
        """Return the state without trials, because measurements have settled them."""
        nothing = Trial.none(len(self.back.sizes))
        return self._replace(back=nothing, ahead=nothing)

    def taken(self, sizes: np.ndarray, other: np.ndarray, factors: np.ndarray) -> Promises:
        """Return the state after `other` has replaced `sizes`; `factors`: see `Trial`."""
        back, ahead = Trial.of(other, sizes, 1 / factors), Trial.none(len(sizes))
        clearly = self.ahead.open and self.ahead.steps < self.patience  # significant: speeds have changed
        patience = _shorter(self.patience, 4 if clearly else 1)
        return self._replace(back=back, ahead=ahead, patience=patience)

    def proposed(self, sizes: np.ndarray, other: np.ndarray, factors: np.ndarray) -> Promises:
        """Start a trial of `other` against `sizes`, the present split; `factors`: see `Trial`."""
        return self._replace(ahead=Trial.of(sizes, other, factors))


def _shorter(patience: np.ndarray, times: int) -> np.ndarray:
    """Return `patience // times`, or 0 if that is less than `FIRST_PATIENCE`."""
    return np.where(patience // times >= FIRST_PATIENCE, patience // times, 0)
