"""A timeline of this process: spans of time on tracks, as profilers show them."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from .activity import BETWEEN, EXCHANGING, OTHER, WAITING, Breakdown

STEPS = "steps"  # the track of the thread that runs the steps
COMPILER = "compiler"
_ACTIVITIES = (*Breakdown._fields, "between steps", "evaluating", "saving", "restoring")


class Span(NamedTuple):
    """A span of time, in seconds of `time.perf_counter`."""

    track: int | str  # local index of a worker, or another track's name
    name: str
    began: float
    ended: float
    details: dict[str, Any]


class Timeline:
    """The spans of some steps.

    Attributes:
      arrivals: time of each message's arrival. A message arrives on all processes at nearly the same time, which is
        used to align the clocks of hosts.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.spans: list[Span] = []
        self.arrivals: list[float] = []
        self._message = ""

    def add(self, track: int | str, name: str, began: float, ended: float | None = None, **details: Any) -> None:
        """Add a span from `began` until `ended`, or until now."""
        self.spans.append(Span(track, name, began, time.perf_counter() if ended is None else ended, details))

    def sends(self, message: str) -> None:
        """Set the name of the message that is exchanged next."""
        self._message = message

    def turned(self, activity: int, began: float, ended: float, waited: float) -> None:
        """Add a span for an activity that ended; the callback of `Activity`."""
        if activity == OTHER:
            return
        details = {"message": self._message} if activity == EXCHANGING else {}
        if waited > 0:
            self.add(STEPS, _ACTIVITIES[WAITING], began, began + waited, **details)
        if activity == EXCHANGING:
            self.arrivals.append(ended)
        if activity < BETWEEN or ended > self.began:
            self.add(STEPS, _ACTIVITIES[activity], max(began + waited, self.began), ended, **details)
