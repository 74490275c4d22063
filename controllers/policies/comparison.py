"""A comparison of two splits by their measured steps: a split of `balance` is given up if steps are longer with it.

The model of times does not know everything that a split changes, such as another process's time slice that is longer
than a step. So the steps with a new split are compared with those before. If they are longer, the policy goes back, and
waits before the next change, four times as long after each one in vain, unless a much larger gain is predicted. If the
steps with the old split turn out to be the longer ones, times have changed for another reason, and the new split is
restored.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEAST, MOST = 4, 20  # stretches with a split that a verdict is based on
SURE = 2.0  # standard errors
LEAST_LOSS = 0.02  # relative; after a smaller loss, do not change back
SOON, CLEAR_LOSS = 2, 0.2  # stretches after which a relative loss of this size is a verdict
FIRST_WAIT, MOST_WAIT = 160, 2560  # stretches without another split, after one that was given up
MORE = 1.5  # a gain of this many times the largest one that was predicted in vain needs no wait


class Measured(NamedTuple):
    """Seconds of a step, that is of its slowest worker, over the latest stretches with one split. A pytree."""

    sizes: np.ndarray  # shape=(n,), int64; all 0 before the first
    looks: np.ndarray  # shape=(), int64: number of stretches, at most `MOST`; then older ones are forgotten
    mean: np.ndarray  # shape=()
    variance: np.ndarray  # shape=(), of one stretch

    @classmethod
    def of(cls, sizes: np.ndarray, seconds: float = 0.0, looks: int = 1) -> Measured:
        """Return the measurement of one stretch; with `looks=0`, none."""
        return cls(np.array(sizes, np.int64), np.asarray(looks), np.asarray(seconds), np.asarray(0.0))

    def see(self, seconds: float) -> Measured:
        """Add a stretch."""
        looks = min(int(self.looks) + 1, MOST)
        off = seconds - float(self.mean)
        variance = (1 - 1 / looks) * (float(self.variance) + off * off / looks)
        return Measured(self.sizes, np.asarray(looks), np.asarray(float(self.mean) + off / looks), np.asarray(variance))

    def longer_than(self, other: Measured) -> bool:
        """Return whether steps are significantly longer than with the `other` split."""
        error = sum(float(split.variance) / max(int(split.looks) - 1, 1) for split in (self, other)) ** 0.5
        return float(self.mean - other.mean) > max(LEAST_LOSS * float(other.mean), SURE * error)


class Comparison(NamedTuple):
    """Measurements of the present split and of another one. A pytree; methods return a new one."""

    here: Measured
    other: Measured  # of the split before; after going back, of the one that was given up
    back: np.ndarray  # shape=(), bool: whether the policy has gone back
    expected: np.ndarray  # shape=(), predicted relative gain of the latest split
    in_vain: np.ndarray  # shape=(), largest gain that was predicted and not measured, since a split last paid
    wait: np.ndarray  # shape=(), int64: stretches before the next split
    patience: np.ndarray  # shape=(), int64: last initial value of `wait`; 0 while splits pay

    @classmethod
    def init(cls, n_workers: int) -> Comparison:
        """Return the state before the first decision."""
        nothing, zero, none = Measured.of(np.zeros(n_workers), looks=0), np.asarray(0.0), np.asarray(0)
        return cls(nothing, nothing, np.asarray(False), zero, zero, none, none)

    def see(self, sizes: np.ndarray, slowest: float, changed: bool) -> Comparison:
        """Add a stretch with the mean seconds of the slowest worker; NaN if unknown.

        If a speed has `changed`, earlier measurements are forgotten, unless the split is so new that it may be why.
        """
        if not slowest > 0:
            return self
        wait = np.asarray(max(int(self.wait) - 1, 0))
        same = np.array_equal(self.here.sizes, sizes)
        forgets = same and changed and self.here.looks >= LEAST
        here = self.here.see(slowest) if same and not forgets else Measured.of(sizes, slowest)
        return (self._ended() if forgets else self)._replace(here=here, wait=wait)

    @property
    def missing(self) -> int:
        """Stretches after which there may be a verdict, or enough measurements for another split; 0 if there are."""
        return 1 if self.other.looks else max(LEAST - int(self.here.looks), 0)

    def allows(self, gain: float, steps: int) -> bool:
        """Return whether a split with this predicted relative gain may replace the present one."""
        return bool((self.here.looks >= LEAST or steps == 1) and (self.wait == 0 or gain > MORE * self.in_vain))

    def moved(self, gain: float) -> Comparison:
        """Return the state after a change of split, with its predicted relative gain."""
        return self._replace(other=self.here, back=np.asarray(False), expected=np.asarray(gain))

    def verdict(self, sizes: np.ndarray, total: int) -> tuple[np.ndarray | None, Comparison]:
        """Judge the present split. Returns the one to change to, shape=(n,), or None; and the state after that."""
        here, other = self.here, self.other
        if not other.looks or not np.array_equal(here.sizes, sizes):
            return None, self
        takes_part = (other.sizes > 0) == (sizes > 0)
        if other.looks < LEAST or not takes_part.all() or not total == sizes.sum() == other.sizes.sum():
            return None, self._ended()
        if here.looks < (SOON if here.mean > (1 + CLEAR_LOSS) * other.mean else LEAST):
            return None, self
        if here.longer_than(other):
            if self.back:
                return other.sizes, self._paid()
            patience = np.asarray(min(max(4 * int(self.patience), FIRST_WAIT), MOST_WAIT))
            in_vain = np.maximum(self.in_vain, self.expected)
            again = self._replace(other=here, back=np.asarray(True), in_vain=in_vain, wait=patience, patience=patience)
            return other.sizes, again
        if not self.back and other.longer_than(here):
            return None, self._paid()
        return None, self._ended() if here.looks >= MOST else self

    def _ended(self) -> Comparison:
        return self._replace(other=self.other._replace(looks=np.asarray(0)))

    def _paid(self) -> Comparison:
        return self._ended()._replace(wait=np.asarray(0), patience=np.asarray(0), in_vain=np.asarray(0.0))
