"""Online change points: workers that have become slower than the others, and than they were.

Bayesian online change-point detection on one series per worker: the logarithm of its normalized seconds, less what all
workers have in common. Each value is the median of `BLOCK` steps, so a pause in a single step (a garbage collection, a
compiler) leaves no trace. Run lengths are truncated, so that a value costs the same throughout a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

BLOCK = 3  # steps of one value: the median ignores one of them
RUNS = 48  # longest run length, in blocks; longer runs count as this long
FRESH = 10  # a change is reported within this many blocks
BEFORE = 5  # blocks before a change that it is compared with
HAZARD = 1e-5  # probability of a change at a block
PROBABILITY = 0.9  # least probability of a change
LEAST = math.log(1.1)  # least change of the logarithm
BACK = math.log(1.05)  # a worker has recovered if it is less than this slower than before
_STAYS = 0.5  # least part of the change in each block since
# The prior of a run: a normal distribution of unknown mean (deviation 0.03 / sqrt(0.02) = 0.2) and variance (0.03^2).
_KAPPA, _ALPHA, _BETA = 0.02, 1.0, 0.03**2

_counts = np.arange(1.0, RUNS + 1)  # values of each run
_kappa, _alpha = _KAPPA + _counts, _ALPHA + _counts / 2
_constant = np.array([math.lgamma(a + 0.5) - math.lgamma(a) for a in _alpha.tolist()])
_prior_constant = math.lgamma(_ALPHA + 0.5) - math.lgamma(_ALPHA)


class Onset(NamedTuple):
    """The onset of a worker's slow phase.

    Attributes:
      worker_slot: which worker.
      steps: number of steps since the change, including the latest one.
      factor: its seconds over those before, relative to the other workers.
      probability: of a change within the last `FRESH` blocks.
    """

    worker_slot: int
    steps: int
    factor: float
    probability: float


class ChangePoints(NamedTuple):
    """Change-point detector of n workers. A pytree of arrays; methods return a new one.

    References:
      Adams & MacKay 2007, "Bayesian Online Changepoint Detection", algorithm 1; Murphy 2007, "Conjugate Bayesian
      analysis of the Gaussian distribution", section 3, for the predictive distribution; Wu et al. 2024, "Falcon:
      Pinpointing and Mitigating Stragglers", for the two conditions of a report.
    """

    block: np.ndarray  # shape=(n, BLOCK), logarithms of the steps of the present block; NaN where unknown
    filled: np.ndarray  # shape=(), int64: steps in it
    origin: np.ndarray  # shape=(n,), the first value of each series, which is subtracted; NaN at first
    log_runs: np.ndarray  # shape=(n, RUNS), log of the posterior of the run length
    mean: np.ndarray  # shape=(n, RUNS), posterior mean of each run
    beta: np.ndarray  # shape=(n, RUNS), posterior scale of each run
    own: np.ndarray  # shape=(n, FRESH + BEFORE), latest values without the common part; NaN at first
    relative: np.ndarray  # shape=(n, FRESH + BEFORE), latest values less the common part
    before: np.ndarray  # shape=(n,), relative value before the onset; NaN for workers that are not slow

    @classmethod
    def init(cls, n_workers: int) -> ChangePoints:
        """Return the state without measurements."""
        nothing = np.full((n_workers, RUNS), -np.inf)
        latest = np.full((n_workers, FRESH + BEFORE), np.nan)
        unknown, zeros = np.full(n_workers, np.nan), np.zeros((n_workers, RUNS))
        block = np.full((n_workers, BLOCK), np.nan)
        return cls(block, np.asarray(0), unknown, nothing, zeros, zeros + _BETA, latest, latest, unknown)

    @property
    def slow(self) -> np.ndarray:
        """Whether each worker is in a slow phase; shape=(n,)."""
        return np.isfinite(self.before)

    @property
    def factor(self) -> np.ndarray:
        """Each slow worker's seconds over those before its slow phase, relative to the others; shape=(n,), else 1."""
        return np.where(self.slow, np.exp(np.maximum(_mean(self.relative[:, -BLOCK:]) - self.before, 0.0)), 1.0)

    def without(self, worker_slots: Sequence[int]) -> ChangePoints:
        """Return the state in which these workers are not slow."""
        before = self.before.copy()
        before[list(worker_slots)] = np.nan
        return self._replace(before=before)

    def observe(self, seconds: np.ndarray, *, compare: bool = True) -> tuple[ChangePoints, list[Onset]]:
        """Return the state after a step, and the slow phases that it has shown to begin.

        Args:
          seconds: of each worker, normalized for its batch size; shape=(n,). Replicated. Values that are not positive
            numbers count as unknown.
          compare: whether what most workers have in common is subtracted. Without it, each series is compared with its
            own past only.
        """
        known = (seconds > 0) & (seconds < np.inf)
        logs = np.log(np.where(known, seconds, 1.0))
        block = self.block.copy()
        block[:, int(self.filled)] = np.where(known, logs, np.nan)
        if self.filled + 1 < BLOCK:
            return self._replace(block=block, filled=self.filled + 1), []
        empty = self._replace(block=np.full_like(block, np.nan), filled=np.asarray(0))
        return empty._see(_lower_median(block), compare=compare)

    def _see(self, own: np.ndarray, *, compare: bool) -> tuple[ChangePoints, list[Onset]]:
        """Return the state after a block, and the onsets. `own`: the medians; shape=(n,), NaN where unknown."""
        known = np.isfinite(own)
        started = known & np.isfinite(self.origin)
        common = 0.0
        if compare and started.any():
            common = float(_lower_median((own - self.origin)[None, started])[0])
        origin = np.where(known & ~started, own - common, self.origin)
        own = own - origin
        relative = own - common
        log_runs, mean, beta = self._updated(np.where(known, relative, 0.0))
        keep = ~known[:, None]
        after = self._replace(
            origin=origin,
            log_runs=np.where(keep, self.log_runs, log_runs),
            mean=np.where(keep, self.mean, mean),
            beta=np.where(keep, self.beta, beta),
            own=np.where(keep, self.own, np.column_stack([self.own[:, 1:], own])),
            relative=np.where(keep, self.relative, np.column_stack([self.relative[:, 1:], relative])),
        )
        recovered = after.slow & known & (_mean(after.relative[:, -BLOCK:]) - after.before < BACK)
        after = after._replace(before=np.where(recovered, np.nan, after.before))
        return after._onsets(known)

    def _updated(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `log_runs`, `mean` and `beta` after a value of each series; shape=(n,)."""
        column = values[:, None]
        prior = _predictive(values, 0.0, _BETA, _KAPPA, _ALPHA, _prior_constant)
        grown = self.log_runs + _predictive(column, self.mean, self.beta, _kappa, _alpha, _constant)
        grown += math.log1p(-HAZARD)
        first = np.isneginf(self.log_runs[:, :1]) & ~np.isfinite(self.log_runs).any(axis=1, keepdims=True)
        new = prior + np.where(first[:, 0], 0.0, math.log(HAZARD))  # the posterior sums to 1
        log_runs = np.column_stack([new, grown[:, :-2], np.logaddexp(grown[:, -2], grown[:, -1])])
        off = column - self.mean
        mean = self.mean + off / (_kappa + 1)
        beta = self.beta + _kappa * off * off / (2 * (_kappa + 1))
        beta[:, -1] *= _alpha[-1] / (_alpha[-1] + 0.5)  # the longest run stays as long, and forgets
        oldest = np.where(np.isfinite(self.log_runs[:, -1]), -1, -2)[:, None]  # whose statistics the last bin takes
        means, betas = (
            np.column_stack([begun, part[:, :-2], np.take_along_axis(part, oldest, axis=1)])
            for begun, part in (
                (values / (_KAPPA + 1), mean),
                (_BETA + _KAPPA * values * values / (2 * (_KAPPA + 1)), beta),
            )
        )
        return log_runs - _log_sum(log_runs)[:, None], means, betas

    def _onsets(self, known: np.ndarray) -> tuple[ChangePoints, list[Onset]]:
        fresh = np.exp(self.log_runs[:, 1:FRESH])  # runs of 2 … FRESH values
        probability = fresh.sum(axis=1)
        candidates = known & ~self.slow & (probability > PROBABILITY) & np.isfinite(self.own).all(axis=1)
        onsets, before = [], self.before.copy()
        for slot in np.flatnonzero(candidates).tolist():
            run = 2 + int(fresh[slot].argmax())
            changes = [_change(series[slot], run) for series in (self.relative, self.own)]
            if min(changes) < LEAST or self._returned(slot, run, changes[0]):
                continue
            before[slot] = _level_before(self.relative[slot], run)
            onsets.append(Onset(slot, run * BLOCK, math.exp(changes[0]), float(probability[slot])))
        return self._replace(before=before), onsets

    def _returned(self, slot: int, run: int, change: float) -> bool:
        """Return whether a block since the change was about as fast as before it."""
        least = float(self.relative[slot, -run:].min()) - _level_before(self.relative[slot], run)
        return least < _STAYS * change


def _predictive(values: Any, mean: Any, beta: Any, kappa: Any, alpha: Any, constant: Any) -> np.ndarray:
    """Return the log density of values under a run's predictive distribution, Student's t."""
    width = 2 * beta * (kappa + 1) / kappa  # 2 alpha times the squared scale
    return constant - 0.5 * np.log(np.pi * width) - (alpha + 0.5) * np.log1p((values - mean) ** 2 / width)


def _log_sum(logs: np.ndarray) -> np.ndarray:
    """Return the log of the sum of exponentials over the last axis."""
    top = logs.max(axis=-1, keepdims=True)
    return top[..., 0] + np.log(np.exp(logs - top).sum(axis=-1))


def _lower_median(values: np.ndarray) -> np.ndarray:
    """Return the lower median of the finite values of each row; NaN where there are none."""
    ordered = np.sort(values, axis=1)  # NaNs come last
    middle = np.maximum((np.isfinite(values).sum(axis=1, keepdims=True) - 1) // 2, 0)
    return np.take_along_axis(ordered, middle, axis=1)[:, 0]


def _mean(values: np.ndarray) -> np.ndarray:
    return values.sum(axis=1) / values.shape[1]


def _level_before(series: np.ndarray, run: int) -> float:
    """Return the median of the `BEFORE` values before the last `run` ones."""
    return float(np.median(series[-run - BEFORE : -run]))


def _change(series: np.ndarray, run: int) -> float:
    return float(series[-run:].mean()) - _level_before(series, run)
