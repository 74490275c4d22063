"""What happened when, in this process: spans of time, each on a track, to be looked at side by side."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from .activity import BETWEEN, EXCHANGING, OTHER, WAITING, Breakdown

STEPS = "steps"  # the track of the thread of the steps
COMPILER = "compiler"
_ACTIVITIES = (*Breakdown._fields, "between steps")


class Span(NamedTuple):
    """One thing that took time, by the clock of `time.perf_counter`."""

    track: int | str  # a worker of this process by its place, or what else there is
    name: str
    began: float
    ended: float
    details: dict[str, Any]


class Timeline:
    """The spans of a stretch of steps.

    Attributes:
      arrivals: when each message had come. It comes to all processes at nearly the same time: clocks of hosts are
        compared by that.
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.spans: list[Span] = []
        self.arrivals: list[float] = []
        self._message = ""

    def add(self, track: int | str, name: str, began: float, ended: float | None = None, **details: Any) -> None:
        """Something has taken from `began` until `ended`, or now."""
        self.spans.append(Span(track, name, began, time.perf_counter() if ended is None else ended, details))

    def sends(self, message: str) -> None:
        """What is exchanged next."""
        self._message = message

    def turned(self, activity: int, began: float, ended: float, waited: float) -> None:
        """An activity has ended, in the thread of the steps; the listener of `Activity`."""
        if activity == OTHER:
            return
        details = {"message": self._message} if activity == EXCHANGING else {}
        if waited > 0:
            self.add(STEPS, _ACTIVITIES[WAITING], began, began + waited, **details)
        if activity == EXCHANGING:
            self.arrivals.append(ended)
        if activity != BETWEEN or ended > self.began:
            self.add(STEPS, _ACTIVITIES[activity], max(began + waited, self.began), ended, **details)
