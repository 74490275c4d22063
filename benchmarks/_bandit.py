"""A bandit over batch rules, as it would run inside a training run: discounted UCB over windows of equal examples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

DISCOUNT, WIDTH, SKIPPED = 0.9, 0.5, 0.25  # per window; of the confidence bounds; share of a window after a switch


@dataclass
class Bandit:
    """Chooses one of n rules for each window of `window` examples, by the losses that it observes.

    A rule's reward is its progress per second: the slope of the loss over the seconds of its window, of which the first
    quarter is skipped. Rewards are divided by the mean over all rules, so that the fall of all of them cancels as far
    as they are played equally often. A rule is played next if its discounted mean reward and confidence bound are the
    largest (Garivier & Moulines 2011, "On upper-confidence bound policies for switching bandit problems").
    """

    n: int
    window: float
    rule: int = 0
    _examples: float = 0.0
    _losses: list[tuple[float, float, float]] = field(default_factory=list)  # examples, seconds and loss of each step
    _reward: np.ndarray = field(init=False)
    _plays: np.ndarray = field(init=False)

    def __post_init__(self):
        self._reward, self._plays = np.zeros(self.n), np.zeros(self.n)

    def see(self, batch: int, clock: float, loss: float) -> None:
        """Take in a step; at the end of a window, choose the next rule."""
        self._examples += batch
        self._losses.append((self._examples, clock, loss))
        if self._examples < self.window:
            return
        kept = np.array([row for row in self._losses if row[0] > SKIPPED * self.window])
        slope = -np.polyfit(kept[:, 1], kept[:, 2], 1)[0] if len(kept) > 2 else 0.0
        self._reward *= DISCOUNT
        self._plays *= DISCOUNT
        self._reward[self.rule] += slope
        self._plays[self.rule] += 1
        self._examples, self._losses = 0.0, []
        self.rule = self._next()

    def _next(self) -> int:
        if (self._plays == 0).any():
            return int(np.argmin(self._plays))
        mean = self._reward / self._plays
        scale = max(float(mean.mean()), 1e-12)
        bonus = WIDTH * np.sqrt(math.log(max(self._plays.sum(), 1.0)) / self._plays)
        return int(np.argmax(mean / scale + bonus))
