"""Limits in seconds that grow with how slow this machine is: all limits of the suite come from here.

A limit only ends what hangs. So it is generous, it is measured anew where it is set, and a job that has reached it goes
on for as long as the machine turns out to be slower than it was. No test passes or fails by how fast it is.
"""

from __future__ import annotations

import os
import time
from functools import cache, lru_cache

SLOWNESS = "TESTS_SLOWNESS"  # measured when the suite starts, for all of its processes; may be set by hand
_LOOP, _REFERENCE = 400_000, 0.022  # a loop of so many rounds takes so many seconds on an idle core
_HEADROOM = 2.0  # the load may come after the measurement
_PROCESSOR_HEADROOM = 3.0  # caches that others use, too, and what the first test of a process imports
_MOST = 100.0
_VALID = 2.0  # seconds: some tests set a limit for each of hundreds of messages, and a measurement takes 22 ms


def slowness() -> float:
    """Return how many times longer a fixed loop takes now than on an idle core: at least 1, at most 100.

    Both count: a slow core, and the share of it that other processes leave.
    """
    begin, total = time.perf_counter(), 0
    for i in range(_LOOP):
        total += i * i % 7
    return min(max(1.0, (time.perf_counter() - begin) / _REFERENCE), _MOST)


@cache
def processor_slowness() -> float:
    """Return how many times more of the processor's time a fixed loop takes than on an idle core: at least 1.

    Without the time for which other processes have the core, unlike `slowness`.
    """
    return max(1.0, min(_processor_seconds() for _ in range(3)) / _REFERENCE)


def _processor_seconds() -> float:
    begin, total = time.process_time(), 0
    for i in range(_LOOP):
        total += i * i % 7
    return time.process_time() - begin


def processor_limit(seconds: float) -> float:
    """Return a limit for what takes less than `seconds` of the processor on an idle machine, in such seconds."""
    return seconds * _PROCESSOR_HEADROOM * processor_slowness()


def at_start() -> float:
    """Return the slowness at the start of the suite; the first call measures it, also for processes started later."""
    if SLOWNESS not in os.environ:
        os.environ[SLOWNESS] = f"{max(slowness() for _ in range(3)):.2f}"
    return float(os.environ[SLOWNESS])


@lru_cache(maxsize=1)
def _slowness_of(period: int) -> float:
    return slowness()


def recent_slowness() -> float:
    """Return the slowness now; it is measured once in `_VALID` seconds."""
    return _slowness_of(int(time.monotonic() // _VALID))


def limit(seconds: float) -> float:
    """Return a limit for what takes less than `seconds` on an idle machine, in seconds."""
    return seconds * _HEADROOM * max(recent_slowness(), at_start())


def last_resort() -> float:
    """Return the limit of a whole test, in seconds: pytest then ends the suite, so jobs end sooner."""
    return 600 * at_start()


class Deadline:
    """The end of what takes less than `seconds` on an idle machine. It moves when the machine is slower than before.

    Args:
      seconds: as for `limit`.

    Attributes:
      limit: seconds from the start to the end, as of now.
    """

    def __init__(self, seconds: float):
        self._begin, self._seconds, self._most = time.monotonic(), seconds, 0.8 * last_resort()
        self.limit = min(limit(seconds), self._most)

    def left(self) -> float:
        """Return the seconds until the end; 0 if it is over."""
        passed = time.monotonic() - self._begin
        if passed >= self.limit:
            self.limit = max(self.limit, min(limit(self._seconds), self._most))
        return max(0.0, self.limit - passed)
