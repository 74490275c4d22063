"""Online change points: workers that have become slower than the others, and than they were.

A window-limited likelihood ratio on one series per worker: the logarithm of its normalized seconds, less what all
workers have in common. Each value is the median of `BLOCK` steps, so a pause in a single step leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BLOCK = 3  # steps of one value: the median ignores one of them
OF_MEDIAN = 0.67  # standard deviation of a median of `BLOCK` steps, over that of a step
FRESH = 9  # a change is found within this many blocks
BEFORE = 8  # blocks before a change that it is compared with
SURE = 6.0  # standard errors of a change
LEAST = math.log(1.1)  # least change of the logarithm
BACK = math.log(1.05)  # a worker has recovered if it is less than this slower than before
STAYS = 0.5  # least part of the change in each block since


class Onset(NamedTuple):
    """The onset of a worker's slow phase."""

    worker_slot: int
    steps: int  # since the change, including the latest one
    factor: float  # its seconds over those before, relative to the other workers


class ChangePoints(NamedTuple):
    """Change-point detector of n workers. A pytree of arrays; methods return a new one.

    References:
      Lai 1995, "Sequential changepoint detection in quality control and dynamical systems"; Wu et al. 2024, "Falcon:
      Pinpointing and Mitigating Stragglers", for the two conditions of a report.
    """

    block: np.ndarray  # shape=(n, BLOCK), logarithms of the steps of the present block; NaN where unknown
    filled: np.ndarray  # shape=(), int64: steps in it
    origin: np.ndarray  # shape=(n,), the first value of each series, which is subtracted; NaN at first
    values: np.ndarray  # shape=(2, n, FRESH + BEFORE), latest values: less the common part, and with it; NaN at first
    before: np.ndarray  # shape=(n,), relative value before the onset; NaN for workers that are not slow

    @classmethod
    def init(cls, n_workers: int) -> ChangePoints:
        """Return the state without measurements."""
        block, unknown = np.full((n_workers, BLOCK), np.nan), np.full(n_workers, np.nan)
        return cls(block, np.asarray(0), unknown, np.full((2, n_workers, FRESH + BEFORE), np.nan), unknown)

    @property
    def slow(self) -> np.ndarray:
        """Whether each worker is in a slow phase; shape=(n,)."""
        return np.isfinite(self.before)

    @property
    def factor(self) -> np.ndarray:
        """Each slow worker's seconds over those before its slow phase, relative to the others; shape=(n,), else 1."""
        return np.where(self.slow, np.exp(np.maximum(self._now - self.before, 0.0)), 1.0)

    @property
    def _now(self) -> np.ndarray:
        return self.values[0, :, -BLOCK:].mean(axis=1)

    def without(self, worker_slots: Sequence[int]) -> ChangePoints:
        """Return the state in which these workers are not slow."""
        before = self.before.copy()
        before[list(worker_slots)] = np.nan
        return self._replace(before=before)

    def observe(self, seconds: np.ndarray, noise: np.ndarray) -> tuple[ChangePoints, list[Onset]]:
        """Return the state after a step, and the slow phases that it has shown to begin.

        `seconds` are normalized for the batch size; those that are not positive numbers count as unknown. `noise` is
        the relative standard deviation of one step's seconds. Each of shape=(n,).
        """
        known = (seconds > 0) & (seconds < np.inf)
        block = self.block.copy()
        block[:, int(self.filled)] = np.where(known, np.log(np.where(known, seconds, 1.0)), np.nan)
        if self.filled + 1 < BLOCK:
            return self._replace(block=block, filled=self.filled + 1), []
        own = _lower_median(block)
        known = np.isfinite(own)
        started = known & np.isfinite(self.origin)
        common = float(_lower_median((own - self.origin)[None, started])[0]) if started.any() else 0.0
        origin = np.where(known & ~started, own - common, self.origin)
        latest = np.stack([own - origin - common, own - origin])[:, :, None]
        values = np.where(known[:, None], np.concatenate([self.values[:, :, 1:], latest], axis=2), self.values)
        after = ChangePoints(np.full_like(block, np.nan), np.asarray(0), origin, values, self.before)
        recovered = after.slow & known & (after._now - after.before < BACK)
        return after._replace(before=np.where(recovered, np.nan, after.before))._onsets(known, OF_MEDIAN * noise)

    def _onsets(self, known: np.ndarray, noise: np.ndarray) -> tuple[ChangePoints, list[Onset]]:
        ready = known & ~self.slow & np.isfinite(self.values).all(axis=(0, 2))
        runs = range(2, FRESH + 1)
        errors = np.array([(1 / run + 1 / BEFORE) ** 0.5 for run in runs])
        earlier = np.stack([self.values[:, :, -run - BEFORE : -run].mean(axis=2) for run in runs], axis=2)
        changes = np.stack([self.values[:, :, -run:].mean(axis=2) for run in runs], axis=2) - earlier
        with np.errstate(invalid="ignore"):
            sure = changes[0] / (errors * noise[:, None])
            found, run_of = ready & (sure.max(axis=1) > SURE), sure.argmax(axis=1)
        onsets, before = [], self.before.copy()
        for slot in np.flatnonzero(found).tolist():
            k = int(run_of[slot])
            change, run = float(changes[0, slot, k]), runs[k]
            least = float(self.values[0, slot, -run:].min() - earlier[0, slot, k])
            if changes[:, slot, k].min() < LEAST or least < STAYS * change:
                continue
            before[slot] = earlier[0, slot, k]
            onsets.append(Onset(slot, run * BLOCK, math.exp(change)))
        return self._replace(before=before), onsets


def _lower_median(values: np.ndarray) -> np.ndarray:
    """Return the lower median of the finite values of each row; NaN where there are none."""
    ordered = np.sort(values, axis=1)  # NaNs come last
    middle = np.maximum((np.isfinite(values).sum(axis=1, keepdims=True) - 1) // 2, 0)
    return np.take_along_axis(ordered, middle, axis=1)[:, 0]
