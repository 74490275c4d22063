"""The choice of the microbatches of one worker, by measured time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from adaptive.runtime.microbatches import GAIN, OVERHEAD_SECONDS, Microbatches, candidates, cheapest

from .contest import Contest
from .timings import MicrobatchTimes

_BETWEEN_MICROBATCHES = 50e-6  # seconds that the host spends between two calls; no call's own timing has them
_FIRST_TRIAL = 2  # steps at a size before kernels are tried
_SETTLED = 16  # steps at a later size before its splits are compared
_LOST = 0.01  # of the steps so far: what comparisons may have cost, before that of a later size begins
_UNANSWERED = 12  # steps in a row whose seconds were asked for and not recorded: then they are asked for seldom
_SIZES = 32  # whose comparisons are kept
_LONGEST = 64  # steps that a choice holds at most, while times decide
_WITH_COMPILER = 8  # while a compiler runs
_FOR_EVER = 1 << 62


def _equal(size: int) -> float:
    """Return the same price for every size."""
    return 1.0


@dataclass(slots=True, eq=False)
class Choice:
    """The microbatches of one worker in the next steps. The same object is used while nothing changes.

    Attributes:
      size: examples of the worker.
      at_least: calls that the step needs at least.
      microbatches: examples of each call; empty for a worker without examples.
      timed: whether the seconds of the step are wanted (`Kernels.record_step`).
      one_by_one: whether the calls should be waited for one by one, to record each (`Kernels.record`).
      trial: whether other calls may be faster.
      steps: for how many steps after the next one it holds. Counted down by the code that takes the steps.
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

    kernels: tuple[int, ...]  # of which splits are made
    contest: Contest


class Chooser:
    """Chooses the microbatches of one worker by time.

    A kernel that is not known yet is timed on a part of a batch that has to be computed anyway. When all are known, the
    splits that may be the fastest are compared by the seconds of whole steps (`Contest`).

    Args:
      fewest: whether to make as few calls as possible, whatever they take, and to try no others.
      overhead_seconds: what a call costs whatever its size, while that has not been measured. At least 50 µs.

    Attributes:
      times: of single calls.
      choice: the last one.
      size: of the last steps.
      steps_at_size: steps in a row with that size.
    """

    def __init__(self, *, fewest: bool = False, overhead_seconds: float = 0.0):
        self.fewest = fewest
        self.times = MicrobatchTimes(max(overhead_seconds, OVERHEAD_SECONDS))
        self.choice = NO_CHOICE
        self.size = self.steps_at_size = 0
        self._granted = -1  # `choice.steps`, when it was made
        self._steps = self._asked_at = 0  # steps so far, and when the contest under way was asked last
        self._timed_at = 0
        self._lost = 0.0  # what comparisons have cost, in steps
        self._unanswered = 0
        self._compared: dict[tuple[int, int], _Compared] = {}
        self._contest: Contest | None = None  # that has made the choice
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._timings: list[tuple[Choice, int, float]] = []  # of the step under way; size 0 for all of a step

    # --- choices ------------------------------------------------------------------------------------------------------

    def fixed(self, size: int, at_least: int, microbatches: Microbatches) -> Choice:
        """Choose these microbatches for as long as the size lasts."""
        self._count_steps(size)
        return self._made(size, at_least, microbatches, steps=_FOR_EVER)

    def choose(self, size: int, at_least: int, ready: Iterable[int], *, quiet: bool) -> Choice:
        """Choose the microbatches of the next steps.

        Args:
          ready: sizes that there are kernels for; `size` can be made of them.
          quiet: whether no compiler runs. While one does, nothing is tried and nothing is compared.
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
        assert best is not None, "a size is taken on when it can be made, and what makes it is kept"
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
        taken = 1 + self._granted - self.choice.steps
        self.steps_at_size = self.steps_at_size + taken if size == self.size else 0
        self._steps += taken
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
        """Return microbatches with one of a size whose seconds are not known; `None` if there is none."""
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
        self._asked_at = self._steps
        return compared

    def _of_contest(self, size: int, at_least: int, contest: Contest) -> Choice:
        elapsed = self._steps - self._asked_at if contest is self._contest else 1
        split, timed, steps = contest.next(elapsed)
        self._asked_at = self._steps
        slower = timed and GAIN * contest.slower(split) > 1
        self._lost += timed * (contest.slower(split) - 1)
        steps = min(steps, _LONGEST - 1)
        return self._made(size, at_least, split, timed=timed, trial=slower, steps=steps, contest=contest)

    # --- what calls cost ----------------------------------------------------------------------------------------------

    def _cheapest(self, size: int, kernels: Iterable[int]) -> Microbatches | None:
        return cheapest(size, kernels, _equal if self.fewest else self._seconds)

    def _seconds(self, size: int) -> float:
        return self.times.predict(size) + _BETWEEN_MICROBATCHES

    def cost(self, size: int, kernels: Iterable[int]) -> float:
        """Return the predicted seconds of a size; infinite if `kernels` cannot make it."""
        calls = cheapest(size, kernels, self.times.predict)
        return inf if calls is None else sum(map(self.times.predict, calls))

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
        """Record the seconds of one microbatch of the present step, or, with size 0, those of the whole step."""
        if self.choice.timed:
            self._unanswered = 0
            self._timings.append((self.choice, size, seconds))

    def step_ended(self, *, disturbed: bool) -> None:
        """Learn from the timings of the step, unless it was disturbed."""
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
