"""How long a rank may keep the others waiting before it counts as stuck.

By default that depends on what is known of the rank. A rank that is stopped, or that uses no core inside a step, does
nothing: the limit is ten times the 99th percentile of the time of an operation in this run, and
at least two seconds. In all other cases (hooks, evaluation, checkpoints, input, the script's own code, tracing, C code
that holds the GIL, a debugger) the work may take long once in a while, and nothing measured says how long: the limit is
a minute. The first operations of a group are not enough to tell, so the minute applies to them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

LONGEST = 60.0  # seconds, by default
_SHORTEST = 2.0  # seconds
_TIMES, _PERCENTILE = 10.0, 99.0  # of the times of operations
_FEWEST = 50  # operations, before their times are used


class HangLimits:
    """The limits of one rank's watchdog.

    Args:
      hang_timeout: the setting, in seconds, which applies in all cases; None for the default.
      ends: returns the times at which the recent operations have ended, in seconds.

    Attributes:
      longest: the limit where nothing is known of the rank, in seconds.
      least: the least limit for a rank that is known to do nothing, in seconds.
    """

    def __init__(self, hang_timeout: float | None, ends: Callable[[], Iterable[float]]):
        self._given = hang_timeout is not None
        self.least = _SHORTEST if hang_timeout is None else hang_timeout
        self.longest = LONGEST if hang_timeout is None else hang_timeout
        self._ends = ends

    def shortest(self) -> float:
        """Return the limit for a rank that is known to do nothing, in seconds."""
        if self._given:
            return self.longest
        ends = np.fromiter(self._ends(), float)
        if len(ends) <= _FEWEST:
            return self.longest
        usual = float(np.percentile(np.diff(ends), _PERCENTILE, method="lower"))
        return min(max(_SHORTEST, _TIMES * usual), self.longest)

    def describe(self, shortest: float) -> str:
        """Return a sentence about the setting.

        Args:
          shortest: the present limit for a rank that does nothing, in seconds.
        """
        if self._given or shortest == self.longest:
            return f"hang_timeout= of comm.world() sets the time ({self.longest:g} s; 0: no limit)."
        return (
            f"By default that is {shortest:.1f} s for a rank that is stopped or idle in a step, and {self.longest:g} s "
            "for others; hang_timeout= of comm.world() sets one time (0: no limit)."
        )
