"""The kernel's account of how long processes ran, and how long they waited for a core.

A process without a core does not answer, and makes no progress, like one that hangs. Linux tells them apart: a thread
that is ready to run and has no core is in its run queue, and `/proc/PID/task/TID/schedstat` counts that time. A thread
that is stopped, sleeps or waits for a lock is in no run queue.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

_READY = "R"  # the kernel's letter for a thread that runs or waits for a core
MOST_EXCUSED = 10.0  # times hang_timeout
_NOTABLE, _HOUSEKEEPING = 0.1, 0.02  # fractions of the time


class CoreTime(NamedTuple):
    """The account of a process at one time. Sums over its threads.

    Attributes:
      ran: seconds for which threads ran on a core.
      queued: seconds for which threads were ready to run and had no core. A wait is added when it ends.
      ready: whether a thread is running or waiting for a core at this time.
    """

    ran: float
    queued: float
    ready: bool

    def core_wait(self, earlier: CoreTime, seconds: float) -> float:
        """Return for how much of the last `seconds`, those since `earlier`, the process waited for a core.

        Args:
          earlier: the account at the beginning.
          seconds: the time between the accounts.
        """
        queued = self.queued - earlier.queued
        if self.ready and earlier.ready:  # the present wait is not counted yet
            queued = max(queued, seconds - (self.ran - earlier.ran))
        return min(max(queued, 0.0), seconds)


class CoreUse(NamedTuple):
    """What a process did between two accounts.

    Attributes:
      seconds: the time between them; 0 if there was none before.
      ran: seconds for which its threads ran on a core.
      wait: seconds for which it waited for a core.
    """

    seconds: float = 0.0
    ran: float = 0.0
    wait: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether waits for a core are a notable part of the time."""
        return self.wait > _NOTABLE * self.seconds

    @property
    def sleeps(self) -> bool:
        """Whether the process neither ran nor waited for a core, but for its housekeeping."""
        return self.seconds > 0 and self.ran + self.wait < _HOUSEKEEPING * self.seconds


UNKNOWN_USE = CoreUse()


def core_time(pid: int, without: int = 0) -> CoreTime | None:
    """Return the account of a process of this host, or None if the kernel has none, as outside Linux.

    Args:
      pid: the process.
      without: the native identifier of a thread to leave out, such as the calling one.
    """
    ran = queued = 0
    found = ready = False
    folder = f"/proc/{pid}/task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return None
    for task in (f"{folder}/{thread}" for thread in threads if thread != str(without)):
        with suppress(OSError, ValueError, IndexError):  # the thread has ended
            ran_ns, queued_ns, *_ = map(int, _text(f"{task}/schedstat").split())
            state = _text(f"{task}/stat").rpartition(")")[2].split()[0]
            ran, queued = ran + ran_ns, queued + queued_ns
            ready |= state == _READY
            found = True
    return CoreTime(ran * 1e-9, queued * 1e-9, ready) if found else None


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


class CoreWaits:
    """How long each rank waited for a core since it was last well, as one rank learns it from its rounds of requests.

    Args:
      hang_timeout: the setting, in seconds. At most ten times that is excused.
    """

    def __init__(self, hang_timeout: float):
        self._most = MOST_EXCUSED * hang_timeout
        self._latest: dict[int, tuple[float, CoreTime]] = {}  # by number: when, and what
        self._excused: dict[int, float] = {}

    def forget(self, number: int) -> None:
        """Forget the measurements of a rank that answered."""
        self._latest.pop(number, None)
        self._excused.pop(number, None)

    def add(self, number: int, at: float, now: CoreTime) -> CoreUse:
        """Record an account. Returns the use of cores since the one before.

        Args:
          number: the rank.
          at: the time of the account, in seconds.
          now: the account.
        """
        before, earlier = self._latest.get(number, (at, now))
        self._latest[number] = at, now
        wait = now.core_wait(earlier, at - before)
        self._excused[number] = min(self._excused.get(number, 0.0) + wait, self._most)
        return CoreUse(at - before, max(0.0, now.ran - earlier.ran), wait)

    def excused(self, number: int) -> float:
        """Return the seconds that do not count against a rank."""
        return self._excused.get(number, 0.0)
