"""Whether splits are as good as was promised: judged on steps behind the decision, as wholes.

A model of times is learnt from the steps that a decision is taken by. Where those were slow by chance (others had the
core for some steps; the neighbor's time slices are longer than a step), it promises a gain that the next steps do not
keep, and following it is worse than nothing. Steps behind a decision were not chosen by, and the slowest worker of each
tells what that step would have taken under another split. So a split that turns out worse than the one before is given
up for that, and from then on a split is first tried on paper, for twice as many steps as the last time: it has to be
better in steps that were not known when it was proposed. With promises that are kept this comes to nothing again.

Of a worker's seconds what follows its batch is what it takes at the least. The rest are stalls, such as a neighbor's
time slice that is longer than the step: they come whatever the batch is, and under another split they come as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FIRST_PATIENCE, MOST_PATIENCE = 10, 320  # steps on paper
LEAST_STEPS, MOST_STEPS = 5, 20  # that a verdict takes; what comes later tells of other times
SURE = 2.0  # standard errors
LEAST_LOSS = 0.03  # relative, of a promise that was broken


class Trial(NamedTuple):
    """One split beside the one in force, on the steps since it was proposed. A pytree."""

    sizes: np.ndarray  # shape=(n,), int64: the split in force; all 0 where none is on trial
    other: np.ndarray  # shape=(n,), int64: the one that it is compared with
    factors: np.ndarray  # shape=(n,), what the other takes of each worker, over what this one does
    least: np.ndarray  # shape=(n,), the least seconds of each worker so far; infinite before the first
    steps: np.ndarray  # shape=(), int64
    seconds: np.ndarray  # shape=(), that these steps took
    total: np.ndarray  # shape=(), sum over the steps of the seconds that the other would have saved …
    squares: np.ndarray  # shape=(), … and of their squares

    @classmethod
    def none(cls, n_workers: int) -> Trial:
        """Nothing on trial."""
        nobody = np.zeros(n_workers, np.int64)
        nothing = np.asarray(0.0)
        least = np.full(n_workers, np.inf)
        return cls(nobody, nobody, np.ones(n_workers), least, np.asarray(0), nothing, nothing, nothing)

    @classmethod
    def of(cls, sizes: np.ndarray, other: np.ndarray, factors: np.ndarray) -> Trial:
        """Begin one."""
        start = cls.none(len(sizes))
        return start._replace(sizes=sizes.astype(np.int64), other=other.astype(np.int64), factors=factors)

    @property
    def open(self) -> bool:
        """Whether there is one."""
        return bool(self.sizes.any())

    @property
    def gain(self) -> float:
        """The mean part of a step that the other split would have saved."""
        return float(self.total / self.seconds) if self.seconds else 0.0

    @property
    def error(self) -> float:
        """The standard error of `gain`."""
        n, step = max(int(self.steps), 2), float(self.seconds) / max(int(self.steps), 1)
        variance = max(float(self.squares) / n - (float(self.total) / n) ** 2, 0.0)
        return float(np.sqrt(variance / (n - 1))) / step if step else 0.0

    def see(self, sizes: np.ndarray, seconds: np.ndarray) -> Trial:
        """Take in a step, if it ran with the split in force, and the seconds of all who took examples are known."""
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
    """What is on trial, and how much trial there has to be. A pytree."""

    back: Trial  # of the split that was left
    ahead: Trial  # of a split that is proposed
    patience: np.ndarray  # shape=(), int64: steps that a split is tried for on paper; 0 while promises are kept

    @classmethod
    def init(cls, n_workers: int) -> Promises:
        """Every promise is believed."""
        return cls(Trial.none(n_workers), Trial.none(n_workers), np.asarray(0))

    def see(self, sizes: np.ndarray, seconds: np.ndarray) -> Promises:
        """Take in a step; int and float, shape=(n,)."""
        if not (self.back.open or self.ahead.open):
            return self
        return self._replace(back=self.back.see(sizes, seconds), ahead=self.ahead.see(sizes, seconds))

    def without_others(self, sizes: np.ndarray, active: np.ndarray, total: int) -> Promises:
        """Without trials beside another split than this, of one over others than those who are `active`, or for another
        global batch than `total`.
        """
        if not (self.back.open or self.ahead.open):
            return self

        def still(trial: Trial) -> Trial:
            goes_on = np.array_equal(trial.sizes, sizes) and total == sizes.sum()
            return trial if goes_on and np.array_equal(np.flatnonzero(trial.other), active) else Trial.none(len(sizes))

        return self._replace(back=still(self.back), ahead=still(self.ahead))

    @property
    def broken(self) -> bool:
        """Whether the split that was left would have been better."""
        return bool(self.back.steps >= LEAST_STEPS and self.back.gain > max(LEAST_LOSS, SURE * self.back.error))

    def tried_enough(self, gain: float) -> bool:
        """Whether the split that is proposed has been better by more than `gain`: for as long as it takes, or so
        clearly that the longer it would take the clearer it has to be."""
        tried = self.ahead
        clear = tried.steps >= LEAST_STEPS and tried.gain > np.sqrt(self.patience) * tried.error
        long = tried.steps >= self.patience and tried.gain > SURE * tried.error
        return bool(tried.open and tried.gain > gain and (clear or long))

    def judged(self) -> Promises:
        """With the verdict on the split in force, if there is one by now."""
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
        """Without trials: what was measured has settled them."""
        nothing = Trial.none(len(self.back.sizes))
        return self._replace(back=nothing, ahead=nothing)

    def taken(self, sizes: np.ndarray, other: np.ndarray, factors: np.ndarray) -> Promises:
        """The split `other` takes the place of `sizes`, with these factors of the workers' times."""
        back, ahead = Trial.of(other, sizes, 1 / factors), Trial.none(len(sizes))
        clearly = self.ahead.open and self.ahead.steps < self.patience  # so speeds have changed, and it was no chance
        patience = _shorter(self.patience, 4 if clearly else 1)
        return self._replace(back=back, ahead=ahead, patience=patience)

    def proposed(self, sizes: np.ndarray, other: np.ndarray, factors: np.ndarray) -> Promises:
        """`other` is tried on paper beside `sizes`."""
        return self._replace(ahead=Trial.of(sizes, other, factors))


def _shorter(patience: np.ndarray, times: int) -> np.ndarray:
    """A part of it; 0 where that is less than the first."""
    return np.where(patience // times >= FIRST_PATIENCE, patience // times, 0)
