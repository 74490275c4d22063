"""Checks after each step: durations, skipped steps, and NaNs in updates."""

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
    """Durations of the previous step, as drivers read them. Local.

    Attributes:
      compute_seconds: per worker of this process; NaN if unknown.
      began: start of the last step that began, by `time.perf_counter`; NaN before the first.
      beside_compiler: number of consecutive steps, up to now, without known seconds because a compiler ran beside them.
    """

    def __init__(self, world: WorldMessages):
        self.compute_seconds = [_NAN] * len(world.workers)
        self.beside_compiler = 0
        self.began = _NAN

    def record(self, seconds: Sequence[float], *, beside_compiler: bool, tried_at_a_loss: Sequence[bool]) -> None:
        """Record the seconds of a step; NaN if they do not measure the machine's speed, so that policies ignore them.

        That is the case if a compiler of this process ran beside the step, and for a worker that tried slower kernels.
        """
        self.beside_compiler = self.beside_compiler + 1 if beside_compiler else 0
        if not beside_compiler and True not in tried_at_a_loss:
            self.compute_seconds = list(seconds)
            return
        lost = [beside_compiler or tried for tried in tried_at_a_loss]
        self.compute_seconds = [_NAN if is_lost else s for s, is_lost in zip(seconds, lost, strict=True)]

    def forget(self, places: Iterable[int]) -> None:
        """Mark the seconds of these workers (by local index) as unknown."""
        for place in places:
            self.compute_seconds[place] = _NAN

    def restart(self) -> None:
        """Mark all durations as unknown, as before the first step."""
        self.forget(range(len(self.compute_seconds)))
        self.began = _NAN


class SkippedSteps:
    """Counter of steps that are skipped because a reduced value is not finite. Replicated.

    Args:
      most: maximum number of consecutive skipped steps.
    """

    def __init__(self, nonfinite: NonFinite, most: int):
        self._raises, self._most = nonfinite == "raise", most
        self.in_a_row = 0

    @property
    def next_raises(self) -> bool:
        """Whether the next step that is not finite raises an error."""
        return self._raises or self.in_a_row == self._most

    def check(self, trouble: Trouble | None, step: int) -> list[str]:
        """Return notes on why a step is skipped; an empty list for a committed step.

        Raises:
          NonFiniteError: the step is not finite and must not be skipped.
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
    """Check for NaNs in the state after an update.

    Every process finds NaNs in replicated state by itself; NaNs in local state are reported to the others.

    Attributes:
      reported: whether an error was raised for them; after that the state can be read.
    """

    def __init__(self, engine: Engine, name: str):
        self._engine, self._name = engine, name
        self.reported = False

    def here(self, step: int, *, in_step: bool = False) -> None:
        """Raise a NonFiniteError if this process knows that the last update made NaNs.

        Args:
          step: the number of the update's step.
          in_step: whether the other processes are in the next step, and wait for this process.
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
        """Raise a NonFiniteError if the last update made NaNs on any process. Called on all; may communicate."""
        update_nans = self._engine.workers.update_nans
        if update_nans is not None and update_nans.may_differ:
            about = f"{what} of {self._name} after step {step}"
            found = share_found(self._engine.world, self._engine.workers.made_nans(), about)
            if found:
                self.reported = True
                raise made_nans(self._engine.plan, found, step)
        else:
            self.here(step)
