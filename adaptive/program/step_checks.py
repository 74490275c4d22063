"""Checks after each step: durations, and skipped steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adaptive.base.world import World
from adaptive.runtime.finite import Trouble, not_finite

from .arguments import NonFinite

MOST_SKIPPED = 25  # steps in a row; one more raises
_NAN = float("nan")


class StepClock:
    """Durations of the previous step, as drivers read them. Local.

    Attributes:
      compute_seconds: per worker of this process; NaN if unknown.
      began: start of the last step that began, by `time.perf_counter`; NaN before the first.
    """

    def __init__(self, world: World):
        self.compute_seconds = [_NAN] * len(world.workers)
        self.began = _NAN

    def record(self, seconds: Sequence[float], *, beside_compiler: bool) -> None:
        """Record the seconds of a step; NaN if a compiler of this process ran beside it, so that policies ignore them:
        then they do not measure the machine's speed.
        """
        self.compute_seconds = [_NAN] * len(seconds) if beside_compiler else list(seconds)

    def forget(self, places: Iterable[int]) -> None:
        """Mark the seconds of these workers (by local index) as unknown."""
        for place in places:
            self.compute_seconds[place] = _NAN

    def restart(self) -> None:
        """Mark all durations as unknown, as before the first step."""
        self.forget(range(len(self.compute_seconds)))
        self.began = _NAN


class SkippedSteps:
    """Counter of consecutive steps that are skipped because a reduced value is not finite. Replicated.

    Attributes:
      checks: whether values that are not finite prevent a commit, and NaNs in the state a checkpoint.
      raises: whether such a step raises an error.
      in_a_row: steps that were skipped since the last one that was committed.
    """

    def __init__(self, nonfinite: NonFinite):
        self.checks, self.raises = nonfinite != "allow", nonfinite == "raise"
        self.in_a_row = 0

    def check(self, trouble: Trouble | None, step: int) -> list[str]:
        """Return notes on why a step is skipped; an empty list for a committed step.

        Raises:
          NonFiniteError: the step is not finite and must not be skipped.
        """
        if trouble is None:
            self.in_a_row = 0
            return []
        if self.raises:
            raise not_finite(trouble, step)
        if self.in_a_row == MOST_SKIPPED:
            raise not_finite(trouble, step, MOST_SKIPPED)
        self.in_a_row += 1
        return [f"skipped: {cause}" for cause in trouble.causes]
