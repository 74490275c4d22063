"""Measurement of where the time goes: the thread that runs the steps is in exactly one activity at any moment.

So the parts of a step add up to its duration. Time that belongs to no named activity is `other`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .world import World


class Breakdown(NamedTuple):
    """Seconds of one step of this process, by activity. They add up to `Report.seconds`. Local.

    Attributes:
      input: waiting for examples.
      computing: running segments and waiting for devices.
      exchanging: exchanging messages, without `waiting`.
      waiting: waiting in a collective until the last process entered it.
      hooks: running control hooks.
      compiling: waiting for a compiler.
      other: everything else, mostly this library's own work.
    """

    input: float
    computing: float
    exchanging: float
    waiting: float
    hooks: float
    compiling: float
    other: float


INPUT, COMPUTING, EXCHANGING, WAITING, HOOKS, COMPILING, OTHER = range(len(Breakdown._fields))
BETWEEN, EVALUATING, SAVING, RESTORING = range(len(Breakdown._fields), len(Breakdown._fields) + 4)  # between two steps
NAMES = (*Breakdown._fields, "script", "evaluating", "saving", "restoring")
"""Names of the activities; "script" is the script's own code between two steps."""


class WorkerSeconds(NamedTuple):
    """Seconds of a step, of every worker. Each has shape=(capacity,); 0 for an empty slot.

    Attributes:
      input: waiting for examples. Replicated.
      computing: from the dispatch of the first microbatch execution until the message is ready. Replicated.
      busy: since the last message of the previous step, without time in messages: the worker with the most made the
        others wait. Replicated.
      waiting: waiting for other workers, in all messages of the step. From this process's own measurement. Local.
    """

    input: np.ndarray
    computing: np.ndarray
    busy: np.ndarray
    waiting: np.ndarray

    @classmethod
    def measured(
        cls, input_: np.ndarray, computing: np.ndarray, busy: np.ndarray, workers: range, waited: float
    ) -> WorkerSeconds:
        """Return the seconds of all workers; `workers` of this process, which `waited` so long in the step.

        Between two steps' last messages all workers are busy or wait: who was busy for less waited for as much longer.
        """
        own = busy[workers.start : workers.stop].max(initial=0.0)
        together = max(own + waited, busy.max(initial=0.0))
        return cls(input_, computing, busy, np.where(busy > 0, together - busy, 0.0).astype(busy.dtype))


class Activity:
    """The current activity of the thread that runs the steps, and the seconds of each.

    Args:
      world: measures the waiting for other processes.

    Attributes:
      now: the current activity; read from any thread.
      marks: changes of activity, added up when seconds are read: (activity, time, `world.waited`); `~activity` for one
        with which a step begins. Code of every step sets `now` and adds a mark itself, in place of `turn`.
    """

    def __init__(self, world: World):
        self._world = world
        self.now = self._at = BETWEEN  # `_at`: at the last mark that was added up
        self._waited = world.waited
        self._began = self._since = time.perf_counter()
        self.marks: list[tuple[int, float, float]] = []
        self._seconds = [0.0] * len(NAMES)  # of all steps so far
        self._before = list(self._seconds)  # when the step began
        self._known = list(self._seconds)  # at the last call of `between`
        # Total seconds without waiting for other processes and without messages, when the last status was sent.
        self._reported = 0.0

    def turn(self, to: int) -> int:
        """Switch to another activity. Return the previous one, to switch back to."""
        before, self.now = self.now, to if to >= 0 else ~to
        self.marks.append((to, time.perf_counter(), self._world.waited))
        return before

    def _add_up(self) -> None:
        totals = self._seconds
        for to, now, waited in self.marks:
            seconds, others = now - self._since, waited - self._waited
            totals[self._at] += seconds - others
            totals[WAITING] += others
            if to < 0:
                to, self._before = ~to, list(totals)
            self._at, self._since, self._waited = to, now, waited
        self.marks.clear()

    @contextmanager
    def doing(self, what: int) -> Iterator[None]:
        """Switch to an activity for the duration of the block."""
        before = self.turn(what)
        try:
            yield
        finally:
            self.turn(before)

    def begin(self, what: int = OTHER) -> None:
        """Start a step with an activity."""
        self.turn(~what)

    def end(self) -> Breakdown:
        """End the step and return its breakdown."""
        self.marks.append((BETWEEN, time.perf_counter(), self._world.waited))
        self.now = BETWEEN
        self._add_up()
        return tuple.__new__(Breakdown, map(sub, self._seconds, self._before[:BETWEEN]))  # in C: every step ends so

    def between(self) -> dict[str, float]:
        """Return the seconds from the last call of this method to the beginning of the last step, by `NAMES`, without
        zeros. Call it between two steps.
        """
        self._add_up()
        found = {name: s for name, s in zip(NAMES, map(sub, self._before, self._known), strict=True) if s > 0}
        self._known = list(self._seconds)
        return found

    def of_workers(self, computing: Sequence[float]) -> tuple[float, Sequence[float], list[float]]:
        """Return this process's part of `WorkerSeconds` for the status. Call it directly after `turn`.

        Args:
          computing: seconds per worker of this process; NaN for one without examples.

        Returns:
          `(input, computing, busy)`, the last two per worker. Workers of one process compute side by side: one that
          finished early was busy for less.
        """
        self._add_up()
        by_itself = self._since - self._began - self._seconds[EXCHANGING] - self._seconds[WAITING]
        busy, self._reported = by_itself - self._reported, by_itself
        input_ = self._seconds[INPUT] - self._before[INPUT]
        if len(computing) == 1 and computing[0] == computing[0]:
            return input_, computing, [busy]
        own = [0.0 if math.isnan(seconds) else seconds for seconds in computing]
        # Computation during an exchange takes no time of this thread: scale the measured seconds to cover it.
        longest = max(own, default=0.0)
        least = [busy * seconds / longest if longest else 0.0 for seconds in own]
        return input_, own, [max(busy - (longest - s), part) for s, part in zip(own, least, strict=True)]
