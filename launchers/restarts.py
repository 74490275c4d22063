"""Decides whether a job that has failed is started again: `adaptive run --restarts`.

A job that fails after it has saved a further checkpoint makes progress, and may fail any number of times. Without
progress it is started again a limited number of times, and only once if the program itself fails twice in the same way.
"""

from __future__ import annotations

import signal
from typing import NamedTuple

USAGE = 2  # the exit code for an invalid command line
_SIGNALS = 128  # exit codes above are 128 + the signal that killed a process


class JobEnd(NamedTuple):
    """How a job has ended."""

    code: int
    ended_by: signal.Signals | None  # the signal to the launcher that ended it
    saved: int | None  # the step of the last checkpoint that it has written


class Restarts:
    """The starts of one job; `most`: how many times in a row it is started again without a further checkpoint."""

    def __init__(self, most: int):
        self._most = most
        self._saved: int | None = None  # the step of the newest checkpoint of all starts
        self._without_progress = 0  # restarts since then
        self._code: int | None = None  # of the last failure without progress

    def after(self, end: JobEnd) -> tuple[bool, str]:
        """Return whether the job is started again after this end, and a sentence for the user; "" if none is needed."""
        if not self._most or end.code in (0, USAGE) or end.ended_by is not None:
            return False, ""
        progress = end.saved is not None and (self._saved is None or end.saved > self._saved)
        if progress:
            self._saved, self._without_progress, self._code = end.saved, 0, None
        none = self._saved is None
        newest = "it has written no checkpoint" if none else f"its newest checkpoint is that of step {self._saved}"
        failed, again = f"the job ended with {end.code}; {newest}", "It is not started again."
        if not progress and end.code < _SIGNALS and end.code == self._code:
            return False, f"{failed}, as when it failed before. {again}"
        if self._without_progress == self._most:
            return False, f"{failed}, as {self._most} starts before (--restarts {self._most}). {again}"
        self._without_progress += 1
        self._code = end.code
        return True, f"{failed}. It is started again ({self._without_progress} of {self._most})."
