"""The choice of the microbatches of one worker, by measured time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from adaptive.runtime.microbatches import GAIN, OVERHEAD_SECONDS, Microbatches, candidates, cheapest

from .contest import Contest
from .timings import MicrobatchTimes

_BETWEEN_MICROBATCHES = 50e-6  # seconds of the host between two microbatches, which their timings do not include
_FIRST_TRIAL = 2  # steps at a size before kernels are tried
_SETTLED = 16  # steps at a later size before its splits are compared
_LOST = 0.01  # maximum cost of comparisons so far, as a share of all steps, before another comparison starts
_UNANSWERED = 12  # consecutive steps whose requested seconds were not recorded, after which requests are rare
_SIZES = 32  # number of sizes whose comparisons are kept
_LONGEST = 64  # maximum number of steps for which a choice by time is valid
_WITH_COMPILER = 8  # the same while a compiler runs
_FOR_EVER = 1 << 62


def _equal(size: int) -> float:
    """Return 1.0, the same price for every size."""
    return 1.0


@dataclass(slots=True, eq=False)
class Choice:
    """The microbatches of one worker in the next steps. The same object is used while nothing changes.

    Attributes:
      size: examples of the worker.
      at_least: the minimum number of microbatches in the step.
      microbatches: examples of each microbatch; empty for a worker without examples.
      timed: whether the step's seconds should be recorded (`Kernels.record_step`).
      one_by_one: whether the step should wait for each microbatch, to record its seconds (`Kernels.record`).
      trial: whether other microbatches may be faster.
      steps: the number of steps after the next one for which it is valid. Counted down by the code that runs the steps.
    """

    size: int
    at_least: int
    microbatches: Microbatches
    timed: bool = False
    one_by_one: bool = False
    trial: bool = False
    steps: int = 0


NO_CHOICE = Choice(-1, 0, ())


class _Compared(NamedTuple):
    """The comparison of the splits of one size."""

    kernels: tuple[int, ...]  # the kernels of which splits are composed
    contest: Contest


class Chooser:
    """Chooses the microbatches of one worker by measured time.

    A new kernel is timed on a part of a real batch. When all kernels have timings, the splits that may be the fastest
    are compared by the seconds of whole steps (`Contest`).

    Args:
      fewest: whether to use as few microbatches as possible, without trials.
      overhead_seconds: the assumed fixed cost of a microbatch until it is measured; at least 50 µs.

    Attributes:
      times: timings of single microbatches.
      choice: the last choice.
      size: the size of the last steps.
      steps_at_size: number of consecutive steps with that size.
    """

    def __init__(self, *, fewest: bool = False, overhead_seconds: float = 0.0):
        self.fewest = fewest
        self.times = MicrobatchTimes(max(overhead_seconds, OVERHEAD_SECONDS))
        self.choice = NO_CHOICE
        self.size = self.steps_at_size = 0
        self._granted = -1  # `choice.steps`, when it was made
        self._steps = self._taken = 0  # steps so far, the next one included; those since the last choice
        self._timed_at = 0
        self._lost = 0.0  # cost of comparisons so far, in steps
        self._unanswered = 0
        self._compared: dict[tuple[int, int], _Compared] = {}
        self._contest: Contest | None = None  # the contest that made the last choice
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._timings: list[tuple[Choice, int, float]] = []  # of the current step; size 0: the whole step

    # --- choices ------------------------------------------------------------------------------------------------------

    def fixed(self, size: int, at_least: int, microbatches: Microbatches) -> Choice:
        """Choose these microbatches until the size changes."""
        self._count_steps(size)
        return self._made(size, at_least, microbatches, steps=_FOR_EVER)

    def choose(self, size: int, at_least: int, ready: Iterable[int], *, quiet: bool) -> Choice:
        """Choose the microbatches of the next steps.

        Args:
          ready: sizes with compiled kernels, of which `size` can be composed.
          quiet: whether no compiler runs. While one runs, there are no trials and comparisons.
        """
        self._count_steps(size)
        kernels = sorted(ready)
        allowed = tuple(k for k in kernels if k <= -(-size // at_least))
        trial = self._trial(size, allowed) if quiet and self.steps_at_size >= _FIRST_TRIAL else None
        if trial is not None:
            return self._made(size, at_least, trial, timed=True, one_by_one=len(set(trial)) > 1, trial=True)
        compared = self._compare(size, at_least, allowed, quiet=quiet)
        if compared is not None and quiet:
            return self._of_contest(size, at_least, compared.contest)
        best = compared.contest.best if compared is not None else self._cheapest(size, allowed)
        best = best or self._cheapest(size, kernels)
        assert best is not None, "the kernels for a size in force are not dropped"
        often = self._unanswered < _UNANSWERED and any(map(self.times.wanted, best))
        timed = often or self._steps - self._timed_at >= _LONGEST
        holds = 1 if timed else self._until_compared() if quiet else _WITH_COMPILER
        return self._made(size, at_least, best, timed=timed, one_by_one=timed and len(set(best)) > 1, steps=holds - 1)

    @property
    def _settling(self) -> int:
        """The number of steps at a size before its splits are compared."""
        return _SETTLED if self._compared else _FIRST_TRIAL

    def _until_compared(self) -> int:
        left = self._settling - self.steps_at_size
        return left if left > 0 else _LONGEST

    def _count_steps(self, size: int) -> None:
        """Count the steps since the last choice, the next one included."""
        self._taken = 1 + self._granted - self.choice.steps
        self.steps_at_size = self.steps_at_size + self._taken if size == self.size else 0
        self._steps += self._taken
        self.size = size

    def _made(
        self,
        size: int,
        at_least: int,
        microbatches: Microbatches,
        *,
        timed: bool = False,
        one_by_one: bool = False,
        trial: bool = False,
        steps: int = 0,
        contest: Contest | None = None,
    ) -> Choice:
        key = (size, at_least, microbatches, timed, one_by_one, trial)
        choice = self._choices.get(key)
        if choice is None:
            if len(self._choices) >= _SIZES:
                self._choices.clear()
            choice = self._choices[key] = Choice(*key)
        choice.steps = self._granted = steps
        self.choice, self._contest = choice, contest
        if timed:
            self._timed_at = self._steps
            self._unanswered += 1
        return choice

    def _trial(self, size: int, kernels: Sequence[int]) -> Microbatches | None:
        """Return microbatches that include a size without known seconds; `None` if all are known."""
        if self.fewest or self._unanswered >= _UNANSWERED:
            return None
        for unknown in reversed(kernels):
            if unknown <= size and self.times.wanted(unknown):
                rest = self._cheapest(size - unknown, kernels) if size > unknown else ()
                if rest is not None:
                    return (unknown, *rest)
        return None

    def _compare(self, size: int, at_least: int, kernels: tuple[int, ...], *, quiet: bool) -> _Compared | None:
        """Return the comparison of the splits of a size; `None` if there is none yet."""
        compared = self._compared.get((size, at_least))
        if compared is not None and compared.kernels == kernels:
            return compared
        if self.fewest or not quiet or self.steps_at_size < self._settling:
            return None
        if self._compared and self._lost > _LOST * self._steps:
            return None
        if any(k <= size and self.times.wanted(k) for k in kernels):
            return None
        predicted = candidates(size, kernels, self._seconds)
        if not predicted:
            return None
        self._compared[size, at_least] = compared = _Compared(kernels, Contest(predicted))
        while len(self._compared) > _SIZES:
            del self._compared[next(iter(self._compared))]
        return compared

    def _of_contest(self, size: int, at_least: int, contest: Contest) -> Choice:
        # A contest counts its own steps: later rounds are not due sooner because of steps at other sizes.
        split, timed, steps = contest.next(self._taken if contest is self._contest else 1)
        slower = timed and GAIN * contest.slower(split) > 1
        self._lost += timed * (contest.slower(split) - 1)
        steps = min(steps, _LONGEST - 1)
        return self._made(size, at_least, split, timed=timed, trial=slower, steps=steps, contest=contest)

    # --- costs --------------------------------------------------------------------------------------------------------

    def _cheapest(self, size: int, kernels: Iterable[int]) -> Microbatches | None:
        return cheapest(size, kernels, _equal if self.fewest else self._seconds)

    def _seconds(self, size: int) -> float:
        return self.times.predict(size) + _BETWEEN_MICROBATCHES

    def cost(self, size: int, kernels: Iterable[int]) -> float:
        """Return the predicted seconds of a size; infinite if it cannot be composed of `kernels`."""
        calls = cheapest(size, kernels, self.times.predict)
        return inf if calls is None else sum(map(self.times.predict, calls))

    def saved_by_exact(self, size: int, microbatches: Microbatches) -> float:
        """Return the seconds that a kernel of this exact size would have saved in the steps so far; 0 if unknown."""
        measured = self.times.seconds
        if not set(microbatches) <= set(measured):
            return 0.0
        longest = max(microbatches)
        now, exact = sum(measured[p] for p in microbatches), measured[longest] / longest * size
        return (now - exact) * self.steps_at_size

    def tried_at_a_loss(self, ready: Iterable[int]) -> bool:
        """Return whether the microbatches of the last step took longer than others would have."""
        if not self.choice.trial:
            return False
        if self._contest is not None:
            return True
        took = sum(map(self.times.at_best, self.choice.microbatches))
        return GAIN * took > self.cost(self.size, ready)

    # --- timings ------------------------------------------------------------------------------------------------------

    def record(self, size: int, seconds: float) -> None:
        """Record the seconds of one microbatch of the current step, or, with size 0, of the whole step."""
        if self.choice.timed:
            self._unanswered = 0
            self._timings.append((self.choice, size, seconds))

    def step_ended(self, *, disturbed: bool) -> None:
        """Add the timings of the step to the estimates, unless it was disturbed."""
        timings, self._timings = self._timings, []
        for choice, size, seconds in timings:
            if disturbed:
                if self._contest is not None:
                    self._contest.discard()
                continue
            if size:
                self.times.record(size, seconds)
                continue
            if self._contest is not None:
                self._contest.record(choice.microbatches, seconds)
            if len(set(choice.microbatches)) == 1:
                self.times.record(choice.microbatches[0], seconds / len(choice.microbatches))

    def forget(self, size: int) -> None:
        """Drop the timings of a size whose kernel was dropped."""
        self.times.forget(size)
