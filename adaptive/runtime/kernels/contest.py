"""Comparison of splits of a batch into microbatches, by timing whole steps in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from adaptive.runtime.microbatches import Microbatches

_CLOSE = 1.2  # splits within this ratio of the least predicted seconds are compared immediately
_COMPARED = 4  # maximum number of splits in the first comparison
_ROUNDS = 16  # rounds of the first comparison
_SLOWER = {4: 1.25, 8: 1.1}  # by number of rounds: the ratio to the least seconds above which a split drops out
_HOPELESS = 4.0  # splits above this ratio of the least predicted seconds are never timed
_WINDOW = 24  # number of last rounds that count in later comparisons
_ENOUGH = 8  # rounds between two decisions to replace the best split
_FIRST_GAP, _GROWTH, _LONGEST_GAP = 16, 1.25, 256  # steps between later rounds of a split
_PRICE = 0.003  # maximum cost of all later rounds, as a share of all time
_UNANSWERED = 4  # unrecorded steps after which timing pauses

WORTH = 0.98  # more microbatches must take less than this ratio of the seconds of fewer
_TIE = 1.01  # fewer microbatches may take up to this ratio of the seconds of more


class Contest:
    """Compares the splits of one batch by the seconds of whole steps that use them, in rounds.

    A round times each split once. Disturbances longer than a round affect all splits equally. Disturbances of single
    steps are ignored, because a split's score is the mean of the faster half of its timings. The first rounds are
    consecutive, and the slowest splits drop out. Later rounds time the best split and one other. They never end, at
    growing intervals, and cost little; so a decision made while the machine was disturbed is corrected.

    Args:
      predicted: predicted seconds by split.

    Attributes:
      best: the split to use. Of equally fast splits, the one with fewest microbatches.
    """

    def __init__(self, predicted: Mapping[Microbatches, float]):
        least = min(predicted.values())
        ranked = sorted(predicted, key=lambda split: (predicted[split], len(split)))
        fewest = min(predicted, key=lambda split: (len(split), predicted[split]))
        self._ratios = {s: predicted[s] / least for s in ranked if s == fewest or predicted[s] <= _HOPELESS * least}
        close = [s for s in ranked if s != fewest and predicted[s] <= _CLOSE * least][: _COMPARED - 1]
        self.best = fewest if least > WORTH * predicted[fewest] else ranked[0]
        self._alive = [fewest, *close]
        self._rounds: deque[dict[Microbatches, float]] = deque(maxlen=4 * _WINDOW)
        self._round: dict[Microbatches, float] = {}
        self._queue: list[Microbatches] = []
        self._count = -1  # rounds so far; the first one warms up and does not count
        self._step = self._asked = 0
        self._due: dict[Microbatches, float] = {}  # the step of each split's next round
        self._gaps = dict.fromkeys(self._ratios, float(_FIRST_GAP))
        self._pairs = dict.fromkeys(self._ratios, 0)  # rounds of each split since the last decision about it
        if len(self._alive) == 1:
            self._conclude()

    @property
    def decided(self) -> bool:
        """Whether the first comparison is over."""
        return bool(self._due) or not self._alive

    def next(self, elapsed: int = 1) -> tuple[Microbatches, bool, int]:
        """Choose the split of the next step.

        Args:
          elapsed: steps since the last call of this function, including that call's step.

        Returns:
          (The split, whether to time the step by `record`, the number of further steps for which it is valid).
        """
        self._step += elapsed
        if not self._queue:
            self._begin_round()
        if self._queue and self._asked == _UNANSWERED:
            self.discard()
            self._due = {split: self._step + max(_LONGEST_GAP, self._gap(split)) for split in self._others()}
            self._alive = []
        if not self._queue:
            wait = min(self._due.values(), default=self._step + _LONGEST_GAP) - self._step
            return self.best, False, max(int(wait) - 1, 0)
        self._asked += 1
        return self._queue[0], True, 0

    def record(self, split: Microbatches, seconds: float) -> None:
        """Record the seconds of a step, if `next` requested them."""
        if not self._queue or split != self._queue[0]:
            return
        self._asked = 0
        self._round[self._queue.pop(0)] = seconds
        if not self._queue:
            self._end_round()

    def discard(self) -> None:
        """Drop the timings of the current round, because something else used the machine."""
        self._queue, self._round, self._asked = [], {}, 0

    def slower(self, split: Microbatches) -> float:
        """Return the ratio of this split's seconds to those of the best one, as far as known."""
        return self._ratios.get(split, 1.0) / self._ratios[self.best]

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _others(self) -> list[Microbatches]:
        return [split for split in self._ratios if split != self.best]

    def _begin_round(self) -> None:
        if not self.decided:
            turn = self._count % len(self._alive)
            self._queue = self._alive[turn:] + self._alive[:turn]
            return
        due = [split for split, step in self._due.items() if step <= self._step]
        if due:
            other = min(due, key=self._due.__getitem__)
            self._queue = [other, self.best] if self._pairs[other] % 2 else [self.best, other]

    def _end_round(self) -> None:
        timed, self._round = self._round, {}
        self._count += 1
        if self.decided:
            self._rounds.append(timed)
            self._judge(next(split for split in timed if split != self.best))
        elif self._count > 0:
            self._rounds.append(timed)
            self._drop_the_slowest()

    def _drop_the_slowest(self) -> None:
        scores = {split: _score([timed[split] for timed in self._rounds]) for split in self._alive}
        least = min(scores.values())
        self._ratios.update({split: score / least for split, score in scores.items()})
        limit = _SLOWER.get(self._count)
        if limit is not None:
            self._alive = [split for split in self._alive if scores[split] <= limit * least]
        if self._count == _ROUNDS or len(self._alive) == 1:
            fewer_first = sorted(self._alive, key=lambda split: (len(split), scores[split]))
            self.best = next(split for split in fewer_first if WORTH * scores[split] <= least)
            self._conclude()

    def _conclude(self) -> None:
        """End the first comparison; later rounds follow at intervals."""
        self._alive = []
        self._pairs = dict.fromkeys(self._pairs, 0)
        self._due = {split: self._step + self._gap(split) for split in self._others()}

    def _gap(self, split: Microbatches) -> float:
        return max(self._gaps[split], (self.slower(split) - 1) * (len(self._ratios) - 1) / _PRICE)

    def _judge(self, other: Microbatches) -> None:
        """Make another split the best one if it is faster."""
        self._pairs[other] += 1
        both = [timed for timed in self._rounds if other in timed and self.best in timed][-_WINDOW:]
        if len(both) >= _ENOUGH:
            ratio = _score([timed[other] for timed in both]) / _score([timed[self.best] for timed in both])
            self._ratios[other] = self._ratios[self.best] * ratio
            fewer = len(other) < len(self.best)
            if self._pairs[other] % _ENOUGH == 0 and ratio < (_TIE if fewer else WORTH):
                self.best = other
                self._gaps = dict.fromkeys(self._gaps, float(_FIRST_GAP))
                self._conclude()
                return
        self._gaps[other] = min(_GROWTH * self._gaps[other], _LONGEST_GAP)
        self._due[other] = self._step + self._gap(other)


def _score(seconds: Sequence[float]) -> float:
    """Return the mean of the faster half."""
    half = sorted(seconds)[: max(1, len(seconds) // 2)]
    return sum(half) / len(half)
