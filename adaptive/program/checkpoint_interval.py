"""The interval between checkpoints that loses the least time: Young's and Daly's rule, from what a run has measured.

References:
  Young 1974, "A first order approximation to the optimum checkpoint interval".
  Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps".
"""

from __future__ import annotations

from math import sqrt

PRIOR_SECONDS = 24 * 3600.0  # before any loss: as if there had been one in a day
_WORTH_A_NOTE = 1.25  # ratio of the interval to the one noted last


class BestInterval:
    """The interval sqrt(2 · stall · mean time between losses).

    A checkpoint costs a stall; a loss costs on average half of an interval, whose steps are taken again. With longer
    intervals the first decreases and the second grows; this interval has the least sum. The mean time between losses is
    (a day + the run's seconds) / (1 + losses): the prior is one loss in a day.
    """

    def __init__(self) -> None:
        self._stalls, self._stalled = 0, 0.0
        self._noted = 0.0

    def record_stall(self, seconds: float) -> None:
        """Add a checkpoint for which the steps have waited that long."""
        self._stalls += 1
        self._stalled += seconds

    @property
    def stall(self) -> float | None:
        """The mean stall of a checkpoint, in seconds; `None` before the first."""
        return self._stalled / self._stalls if self._stalls else None

    def seconds(self, elapsed: float, losses: int) -> float:
        """Return the interval; 0 before the first checkpoint, which measures the stall.

        Args:
          elapsed: seconds since the start of the run.
          losses: number of losses since then.
        """
        stall = self.stall
        return 0.0 if stall is None else sqrt(2 * stall * self._between_losses(elapsed, losses))

    def news(self, elapsed: float, losses: int) -> str:
        """Return a sentence on the interval if it has changed by a quarter since the last one; else ""."""
        seconds = self.seconds(elapsed, losses)
        if self.stall is None or self._noted / _WORTH_A_NOTE <= seconds <= self._noted * _WORTH_A_NOTE:
            return ""
        self._noted = seconds
        return (
            f'a checkpoint every {seconds:.3g} s (every="auto"): one stalls the steps for {self.stall:.3g} s, and the '
            f"mean time between losses is {self._between_losses(elapsed, losses) / 3600:.3g} h, from {losses} in "
            f"{elapsed / 3600:.3g} h and a prior of one in a day."
        )

    @staticmethod
    def _between_losses(elapsed: float, losses: int) -> float:
        return (PRIOR_SECONDS + elapsed) / (1 + losses)
