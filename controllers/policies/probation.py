"""A trial period for splits of short steps: a split is kept only if the measured steps are shorter with it.

`promises.py` judges a split by the model's prediction of the steps under the previous split. For steps of a few
milliseconds the model is not accurate enough: another process's time slice is longer than the step, more microbatches
may cost more than fewer examples save, and waiting workers may use the busy core. So steps are measured under both
splits, one after the other. If the new split is no better, the policy returns to the old one and measures it again. If
times have changed for another reason, this second measurement shows it, and the newer split is restored. Each split
that does not pay makes the policy wait longer before the next one, unless a much larger gain is predicted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controllers.timing._batch_time import same

LEAST, MOST = 4, 20  # stretches that a verdict is based on
SURE = 2.0  # standard errors
LEAST_LOSS = 0.02  # relative; after a smaller loss, do not change back at once
SOON, CLEAR_LOSS = 2, 0.2  # stretches after which a relative loss of this size is a verdict
FIRST_WAIT, MOST_WAIT = 160, 2560  # stretches without another split, after one that did not pay
MORE = 1.5  # a gain of this many times the one that was last predicted and not measured needs no wait
FREE, ON_PROBATION, COMPARING = 0, 1, 2


class Pace(NamedTuple):
    """Seconds of the slowest worker, per step, over the latest stretches with one split. A pytree."""

    sizes: np.ndarray  # shape=(n,), int64; all 0 before the first
    looks: np.ndarray  # shape=(), int64: number of stretches, at most `MOST`; then older ones are forgotten
    mean: np.ndarray  # shape=()
    variance: np.ndarray  # shape=(), of one stretch

    @classmethod
    def init(cls, n_workers: int) -> Pace:
        """Return an empty measurement."""
        return cls(np.zeros(n_workers, np.int64), np.asarray(0), np.asarray(0.0), np.asarray(0.0))

    def see(self, sizes: np.ndarray, seconds: float) -> Pace:
        """Add a stretch; start over with it if it ran with another split."""
        if not same(self.sizes, sizes):
            return Pace(np.array(sizes, np.int64), np.asarray(1), np.asarray(seconds), np.asarray(0.0))
        looks = min(int(self.looks) + 1, MOST)
        off = seconds - float(self.mean)
        variance = (1 - 1 / looks) * (float(self.variance) + off * off / looks)
        return Pace(self.sizes, np.asarray(looks), np.asarray(float(self.mean) + off / looks), np.asarray(variance))

    def gain_over(self, other: Pace) -> tuple[float, float]:
        """Return the relative gain in step time over the `other` split, and its standard error."""
        errors = [float(pace.variance) / max(int(pace.looks) - 1, 1) for pace in (self, other)]
        return 1 - float(self.mean) / float(other.mean), float(np.sqrt(sum(errors))) / float(other.mean)


class Probation(NamedTuple):
    """Measurements of the present split and of another one to compare with. A pytree; methods return a new one."""

    here: Pace
    other: Pace  # of the previous split; while `COMPARING`, of the split that did not pay
    phase: np.ndarray  # shape=(), int64: FREE, ON_PROBATION or COMPARING
    promised: np.ndarray  # shape=(), predicted relative gain of the latest split
    in_vain: np.ndarray  # shape=(), largest gain that was predicted but not measured, since a split last paid
    wait: np.ndarray  # shape=(), int64: stretches before the next split
    patience: np.ndarray  # shape=(), int64: last initial value of `wait`; 0 while splits pay

    @classmethod
    def init(cls, n_workers: int) -> Probation:
        """Return the state before the first decision."""
        zero, none, nothing = np.asarray(0.0), np.asarray(0), Pace.init(n_workers)
        return cls(nothing, nothing, none, zero, zero, none, none)

    def see(self, sizes: np.ndarray, slowest: float, steps: int) -> Probation:
        """Add a stretch. Stretches of one step count only while two splits are compared.

        Args:
          sizes: shape=(n,), int64.
          slowest: seconds of the slowest worker, the mean over the steps.
          steps: steps in the stretch.
        """
        if not slowest > 0 or (steps == 1 and not self.phase):
            return self
        here = self.here.see(sizes, slowest)
        return self._replace(here=here, wait=np.asarray(max(int(self.wait) - 1, 0)))

    def without_others(self, sizes: np.ndarray, total: int) -> Probation:
        """End the comparison if the present split is not `sizes`, or the requested global batch is not its sum."""
        compared = self.phase and self.here.looks
        if compared and (total != sizes.sum() or total != self.other.sizes.sum()):
            return self._replace(phase=np.asarray(FREE))
        return self

    def allows(self, sizes: np.ndarray, gain: float, steps: int) -> bool:
        """Return whether a split with this predicted relative gain may replace `sizes` now.

        Args:
          sizes: the present split; shape=(n,), int64.
          gain: the predicted relative gain.
          steps: number of steps in the latest stretch. If it is 1, the present split needs no measurements.
        """
        known = self.here.looks >= LEAST and same(self.here.sizes, sizes)
        waits = self.wait > 0 and gain <= MORE * self.in_vain
        return bool(self.phase == FREE and not waits and (known or steps == 1))

    def moved(self, sizes: np.ndarray, gain: float) -> Probation:
        """Record a change of split. The new one is on probation if steps with `sizes` were measured."""
        if self.here.looks < LEAST or not same(self.here.sizes, sizes):
            return self._replace(phase=np.asarray(FREE))
        return self._replace(other=self.here, phase=np.asarray(ON_PROBATION), promised=np.asarray(gain))

    def verdict(self, sizes: np.ndarray) -> tuple[np.ndarray | None, Probation]:
        """Judge the present split, `sizes`.

        Returns:
          The split to change to, shape=(n,), or None; and the probation after that.
        """
        here, looks = self.here, int(self.here.looks)
        compared = self.phase and same(here.sizes, sizes) and not same(sizes, self.other.sizes)
        if not compared or looks < SOON:
            return None, self
        gain, error = here.gain_over(self.other)
        if looks < LEAST and not -gain > max(CLEAR_LOSS, 2 * SURE * error):
            return None, self
        if self.phase == COMPARING:
            if -gain > max(LEAST_LOSS, SURE * error):  # the other one is better after all
                return self.other.sizes, self._paid()
            return None, self._replace(phase=np.asarray(FREE)) if looks >= MOST else self
        if gain > SURE * error:
            return None, self._paid()
        if looks < MOST and not -gain > max(LEAST_LOSS, SURE * error):
            return None, self
        patience = np.asarray(min(max(4 * int(self.patience), FIRST_WAIT), MOST_WAIT))
        in_vain = np.maximum(self.in_vain, self.promised)
        back = self._replace(other=here, phase=np.asarray(COMPARING), wait=patience, patience=patience, in_vain=in_vain)
        return self.other.sizes, back

    def _paid(self) -> Probation:
        none = np.asarray(0)
        return self._replace(phase=np.asarray(FREE), wait=none, patience=none, in_vain=np.asarray(0.0))
