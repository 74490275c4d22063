"""Stretches: consecutive short steps at the same batch sizes, which a policy evaluates as one.

Evaluating a step costs a policy up to about half a millisecond of Python. For steps of a few milliseconds that exceeds
the gain from balancing, and a single step says little: a time slice of another process is longer than the step. So such
steps are accumulated until their time justifies an evaluation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Look(NamedTuple):
    """A measurement for a policy: one step, or the mean over a stretch."""

    sizes: np.ndarray  # shape=(n,), int64
    seconds: np.ndarray  # shape=(n,), of a step; NaN for a worker that was not measured
    steps: int
    slowest: float  # seconds of the slowest worker, which may be another one in every step: the mean over the steps


class Stretch(NamedTuple):
    """The steps of n workers since the last look. A pytree of arrays and numbers; methods return a new one."""

    sizes: np.ndarray  # shape=(n,), int64: the sizes of these steps; 0 before the first
    total: np.ndarray  # shape=(n,), sums of seconds, over the steps in which they were known
    known: np.ndarray  # shape=(n,), int64: how many those are
    steps: int
    seconds: float  # sum over the steps of the slowest worker's seconds
    new: bool  # whether the only step is the first one at these sizes

    @classmethod
    def init(cls, n_workers: int) -> Stretch:
        """Return an empty stretch."""
        none = np.zeros(n_workers, np.int64)
        return cls(none, np.zeros(n_workers), none, 0, 0.0, False)

    def add(self, sizes: tuple[int, ...], seconds: np.ndarray, enough: float) -> tuple[Stretch, list[Look]]:
        """Add a step, and return the stretches that end before it or with it, as looks.

        A stretch ends with the step by which it has taken `enough` seconds, and where batch sizes change. The first
        step at new sizes holds what changing cost: it counts only where it is a stretch by itself.

        Args:
          sizes: that `seconds` were measured at.
          seconds: shape=(n,). What is not a positive number is missing.
          enough: 0 makes every step a stretch.
        """
        each, before = seconds.tolist(), self.steps  # a few numbers: faster than numpy
        slowest, changed = max(each), sizes != tuple(self.sizes.tolist())
        ended: list[Look] = []
        valid: np.ndarray | bool = True
        if not (min(each) > 0 and sum(each) < np.inf):  # or something is NaN
            valid = (seconds > 0) & (seconds < np.inf)
            seconds = np.where(valid, seconds, 0.0)
            slowest = float(seconds.max())
        if changed and before:
            ended.append(self._look())
        if changed or self.new or not before:
            now = np.array(sizes, np.int64) if changed else self.sizes
            stretch = Stretch(now, seconds, np.ones(len(sizes), np.int64) * valid, 1, slowest, changed)
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
