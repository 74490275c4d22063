"""Checks after each step: how long steps take, which are skipped, and whether updates make NaNs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from adaptive.base.failure import report_failure
from adaptive.base.world_messages import WorldMessages
from adaptive.runtime.engine import Engine
from adaptive.runtime.finite import Trouble, not_finite, skipped_too_often
from adaptive.runtime.nan_updates import made_nans, share_found

from .arguments import NonFinite

_NAN = float("nan")


class StepClock:
    """Seconds of the step before, as drivers read them. Local.

    Attributes:
      compute_seconds: per worker of this process; NaN where not known.
      began: when the step before began, or the one under way; NaN before the first.
      beside_compiler: steps in a row, up to now, whose seconds are not known because a compiler ran beside them.
    """

    def __init__(self, world: WorldMessages):
        self.compute_seconds = [_NAN] * len(world.workers)
        self.beside_compiler = 0
        self.began = _NAN

    def record(self, seconds: Sequence[float], *, beside_compiler: bool, tried_at_a_loss: Sequence[bool]) -> None:
        """Take the seconds of a step: NaN for one beside which this process's own compiler took much of its cores, and
        for a worker that tried a kernel where others would have been faster. Such seconds are not the machine's, and a
        policy that balanced by them would have to take it back.
        """
        self.beside_compiler = self.beside_compiler + 1 if beside_compiler else 0
        if not beside_compiler and True not in tried_at_a_loss:
            self.compute_seconds = list(seconds)
            return
        lost = [beside_compiler or tried for tried in tried_at_a_loss]
        self.compute_seconds = [_NAN if is_lost else s for s, is_lost in zip(seconds, lost, strict=True)]

    def forget(self, places: Iterable[int]) -> None:
        """Mark the seconds of these workers, by local index, as not known."""
        for place in places:
            self.compute_seconds[place] = _NAN

    def restart(self) -> None:
        """Mark everything as not known: the next step is a first one."""
        self.forget(range(len(self.compute_seconds)))
        self.began = _NAN


class SkippedSteps:
    """Counts steps that are skipped because they are not finite. Replicated.

    Args:
      most: steps in a row that may be skipped.
    """

    def __init__(self, nonfinite: NonFinite, most: int):
        self._raises, self._most = nonfinite == "raise", most
        self.in_a_row = 0

    @property
    def next_raises(self) -> bool:
        """Whether another step that is not finite raises."""
        return self._raises or self.in_a_row == self._most

    def check(self, trouble: Trouble | None, step: int) -> list[str]:
        """Return notes on why a step is skipped; none for a step that is committed.

        Raises:
          NonFiniteError: it may not be.
        """
        if trouble is None:
            self.in_a_row = 0
            return []
        if self._raises:
            raise not_finite(trouble, step)
        if self.in_a_row == self._most:
            raise skipped_too_often(trouble, step, self._most)
        self.in_a_row += 1
        return [f"skipped: {cause}" for cause in trouble.causes]


class UpdateCheck:
    """Checks whether the last update has filled the state with NaNs.

    In replicated state every process finds NaNs by itself; those in local state are reported to the others.

    Attributes:
      reported: whether an error was raised for them: after that the state can be read.
    """

    def __init__(self, engine: Engine, name: str):
        self._engine, self._name = engine, name
        self.reported = False

    def here(self, step: int, *, in_step: bool = False) -> None:
        """Raise a NonFiniteError if this process knows that the last update made NaNs.

        Args:
          step: whose update it was.
          in_step: whether the others are in the next step by now, and wait for this process.
        """
        nans = self._engine.workers.update_nans
        if nans is None or nans.none_flagged():
            return
        found = self._engine.workers.made_nans()
        if found:
            self.reported = True
            error = made_nans(self._engine.plan, found, step)
            if in_step and not found.replicated:
                report_failure(self._engine.world, f"in step {step + 1} of {self._name}", error, known=False)
            raise error

    def together(self, step: int, what: str) -> None:
        """Raise a NonFiniteError if the last update made NaNs on any process. All call it; may communicate."""
        update_nans = self._engine.workers.update_nans
        if update_nans is not None and update_nans.may_differ:
            about = f"{what} of {self._name} after step {step}"
            found = share_found(self._engine.world, self._engine.workers.made_nans(), about)
            if found:
                self.reported = True
                raise made_nans(self._engine.plan, found, step)
        else:
            self.here(step)
