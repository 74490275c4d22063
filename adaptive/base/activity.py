"""Where the seconds of a process go: the thread of the steps is in one activity at any moment, and turns to another.

So the parts of a step add up to it: nothing is timed twice, and what nobody has named is `other`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import sub
from typing import NamedTuple, Protocol

import numpy as np


class Breakdown(NamedTuple):
    """Seconds of one step of this process, by what it did. They add up to `Report.seconds`. Local.

    Attributes:
      input: for examples that were not there yet.
      computing: carrying out segments and kernel calls, and waiting for devices.
      exchanging: in messages, but for `waiting`; whatever is computed meanwhile (`overlap=`).
      waiting: for other processes: until the last of them had come to what all do together.
      hooks: in control hooks.
      compiling: for a compiler.
      other: all else, most of it this library's own.
    """

    input: float
    computing: float
    exchanging: float
    waiting: float
    hooks: float
    compiling: float
    other: float


INPUT, COMPUTING, EXCHANGING, WAITING, HOOKS, COMPILING, OTHER = range(len(Breakdown._fields))
BETWEEN = len(Breakdown._fields)  # behind a step and before the next: the script's own code

Turned = Callable[[int, float, float, float], None]
"""`turned(activity, began, ended, waited)`: told of each activity that has ended, by the clock of `time.perf_counter`;
of its seconds the first `waited` were for others."""


class WorkerSeconds(NamedTuple):
    """Seconds of a step, of every worker. Each has shape=(workers,); 0 where nobody sits. Replicated.

    Attributes:
      input: for examples that were not there yet.
      computing: from the dispatch of the first kernel call to what is sent.
      busy: since the message before, but for messages: whoever was busy for longest made the others wait.
    """

    input: np.ndarray
    computing: np.ndarray
    busy: np.ndarray

    @property
    def waiting(self) -> np.ndarray:
        """For the last of them, before the step's last message; shape=(workers,)."""
        return np.where(self.busy > 0, self.busy.max(initial=0.0) - self.busy, 0.0)


class Waits(Protocol):
    """A world, as far as it tells how long it has waited."""

    @property
    def waited(self) -> float:
        """Seconds, so far, that this process has waited for others to come. Local."""
        ...


class Activity:
    """What the thread of the steps is doing, and for how long it has done what.

    Args:
      world: in which the others are waited for.

    Attributes:
      now: what is being done; read from any thread.
      turned: whoever is to be told of each activity that has ended; `None` for nobody.
      message: the number of the message that is exchanged, or was last.
      waited_before: what the world had waited when the step began that `took` accounts for.
    """

    def __init__(self, world: Waits):
        self._world, self.waited_before = world, world.waited
        self.now, self._waited = BETWEEN, world.waited
        self._began = self._since = time.perf_counter()
        self._seconds = [0.0] * (BETWEEN + 1)  # so far, of all steps
        self._before = list(self._seconds)  # when the step began
        self._told = self._by_itself  # when the last status was told
        self.turned: Turned | None = None
        self.message = 0

    def turn(self, to: int) -> int:
        """Do something else from now on. Returns what was done so far, to turn back to."""
        now, waited, before = time.perf_counter(), self._world.waited, self.now
        seconds, others = now - self._since, waited - self._waited
        self._seconds[before] += seconds - others
        self._seconds[WAITING] += others
        if self.turned is not None:
            self.turned(before, self._since, now, others)
        self.now, self._since, self._waited = to, now, waited
        return before

    def took(self, began: float, times: Sequence[float], until: float) -> None:
        """Account for the first part of a step, whose caller has read the clock and set `now` by itself.

        Args:
          began: when the step began, by the clock of `time.perf_counter`.
          times: seconds of `INPUT`, `COMPUTING` and `EXCHANGING`, in which alone others were waited for; the rest of
            the time is `OTHER`'s.
          until: when that part ended. From then on `OTHER` goes on.
        """
        seconds, waited = self._seconds, self._world.waited
        input_, computing, exchanging = times
        between, others = self.waited_before - self._waited, waited - self.waited_before
        exchanging = max(exchanging, others)  # of a step that was given up in its message
        seconds[BETWEEN] += began - self._since - between
        seconds[WAITING] += between
        self._before = list(seconds)
        seconds[INPUT] += input_
        seconds[COMPUTING] += computing
        seconds[EXCHANGING] += exchanging - others
        seconds[WAITING] += others
        seconds[OTHER] += until - began - input_ - computing - exchanging
        self.now, self._since, self._waited = OTHER, until, waited

    @contextmanager
    def doing(self, what: int) -> Iterator[None]:
        """While the block lasts."""
        before = self.turn(what)
        try:
            yield
        finally:
            self.turn(before)

    def begin(self) -> None:
        """A step begins."""
        self.turn(OTHER)
        self._before = list(self._seconds)

    def end(self) -> Breakdown:
        """It has ended. Where its seconds went."""
        now = time.perf_counter()
        if self.turned is None and self._waited == self._world.waited:  # as `turn` does, without a call
            self._seconds[self.now] += now - self._since
            self.now, self._since = BETWEEN, now
        else:
            self.turn(BETWEEN)
        return tuple.__new__(Breakdown, map(sub, self._seconds, self._before[:BETWEEN]))  # in C: every step ends so

    def of_workers(self, computing: Sequence[float]) -> tuple[float, list[float], list[float]]:
        """What a status tells of this process, shortly before it is sent.

        Args:
          computing: seconds per worker of this process; NaN for one without examples.

        Returns:
          Of `WorkerSeconds`: input, computing and busy, the last two for each worker. Workers of one process compute
          side by side: who was done first has been busy for less.
        """
        self.turn(self.now)
        own = [0.0 if math.isnan(seconds) else seconds for seconds in computing]
        busy, self._told = self._by_itself - self._told, self._by_itself
        input_ = self._seconds[INPUT] - self._before[INPUT]
        # What is computed while messages travel takes none of this thread's time: then a part stands for the whole.
        longest = max(own, default=0.0)
        least = [busy * seconds / longest if longest else 0.0 for seconds in own]
        return input_, own, [max(busy - (longest - s), part) for s, part in zip(own, least, strict=True)]

    def busy(self, now: float) -> float:
        """Return the seconds in which this process depended on no other since this, or `of_workers`, was asked last.

        Args:
          now: by the clock of `time.perf_counter`; nobody was waited for since the last `turn`, or `took`.
        """
        between = self.waited_before - self._waited
        by_itself = now - self._began - self._seconds[EXCHANGING] - self._seconds[WAITING] - between
        busy, self._told = by_itself - self._told, by_itself
        return busy

    @property
    def _by_itself(self) -> float:
        """Seconds so far in which this process depended on no other."""
        return self._since - self._began - self._seconds[EXCHANGING] - self._seconds[WAITING]
