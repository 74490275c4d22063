"""Stretches: consecutive short steps at the same batch sizes, which a policy evaluates as one.

A step of a few milliseconds says little, because another process's time slice is longer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Look(NamedTuple):
    """A measurement for a policy: one step, or the mean over a stretch."""

    sizes: np.ndarray  # shape=(n,), int64
    seconds: np.ndarray  # shape=(n,), per step; NaN for workers that were not measured
    steps: int
    slowest: float  # mean over the steps of the slowest worker's seconds; the slowest may differ between steps


class Stretch(NamedTuple):
    """The steps of n workers since the last look. A pytree of arrays and numbers; methods return a new one."""

    sizes: np.ndarray  # shape=(n,), int64: the sizes of these steps; 0 before the first
    total: np.ndarray  # shape=(n,), sums of the known seconds
    known: np.ndarray  # shape=(n,), int64: number of steps with known seconds
    steps: int
    seconds: float  # sum over the steps of the slowest worker's seconds
    new: bool  # whether the only step is the first one at these sizes

    @classmethod
    def init(cls, n_workers: int) -> Stretch:
        """Return an empty stretch."""
        none = np.zeros(n_workers, np.int64)
        return cls(none, np.zeros(n_workers), none, 0, 0.0, False)

    def add(self, sizes: tuple[int, ...], seconds: np.ndarray, enough: float) -> tuple[Stretch, list[Look]]:
        """Add a step; `seconds` that are not positive count as unknown. Returns the new stretch, and ended ones.

        A stretch ends once it has taken `enough` seconds, or when batch sizes change. The first step at new sizes,
        which includes the cost of the change, is left out of stretches of several steps.
        """
        before, changed = self.steps, sizes != tuple(self.sizes.tolist())
        valid = (seconds > 0) & (seconds < np.inf)
        seconds = np.where(valid, seconds, 0.0)
        slowest = float(seconds.max())
        ended: list[Look] = []
        if changed and before:
            ended.append(self._look())
        if changed or self.new or not before:
            now = np.array(sizes, np.int64) if changed else self.sizes
            stretch = Stretch(now, seconds, valid.astype(np.int64), 1, slowest, changed)
        else:
            sums = self.total + seconds, self.known + valid
            stretch = Stretch(self.sizes, *sums, before + 1, self.seconds + slowest, self.new)
        if stretch.seconds >= enough:
            ended.append(stretch._look())
            stretch = Stretch(*stretch[:3], 0, stretch.seconds, False)
        return stretch, ended

    def _look(self) -> Look:
        mean = self.total / np.where(self.known > 0, self.known, np.nan)
        return Look(self.sizes, mean, int(self.steps), float(self.seconds) / int(self.steps))
