"""What each world of a rank is doing, in memory that other processes read without the rank's help.

A rank writes there when an operation of a world begins and ends. Its parent (`supervisor.py`) has created the memory
before the fork, and named its descriptor in the environment. A rank without such a parent creates it itself, and the
other ranks of its host find it by its name in /proc/PID/fd. The thread that performs a world's operations is the only
writer, and takes no lock: a reader may see half of an update, and reads again later.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

ENVIRON = "ADAPTIVE_ACTIVITY"  # the descriptor of the memory
_NAME = "adaptive-activity"
WORLDS = 8  # of a process; further ones are not watched
RECENT = 512  # operations whose beginnings are kept
MOST_BYTES = 160  # of a description
_FEWEST = 50  # operations, before their times are used
_PERCENTILE = 0.99
OUTSIDE, INSIDE, PATIENT, LEFT = range(4)  # phases: PATIENT is inside an operation where the others may be late


class ActivityReading(NamedTuple):
    """What a world of a process is doing, as another process has read it."""

    group: int  # identifies the processes of the world
    survives: bool  # whether the others continue when a process is lost
    hang_timeout: float | None  # the setting, in seconds; None for the default
    phase: int  # OUTSIDE, INSIDE, PATIENT or LEFT
    begun: int  # number of operations begun by this group
    seconds: float  # since the latest one began
    about: str  # the latest operation; if the phase is LEFT, why the process has left
    usual: float | None  # the 99th percentile of the seconds between two operations; None if there were too few

    @property
    def inside(self) -> bool:
        """Whether it is in an operation."""
        return self.phase in (INSIDE, PATIENT)


class WorldActivity(ctypes.Structure):
    """What one world of this process is doing; private memory until the world is watched.

    Its fields are those of `ActivityReading`, but `group` is 0 while the world is not watched, a negative
    `hang_timeout` stands for the default, and `since` is when the latest operation began, by `time.perf_counter`.
    `recent` has the beginnings of the recent operations, by their numbers modulo RECENT.
    """

    _fields_ = (
        ("group", ctypes.c_int64),
        ("survives", ctypes.c_bool),
        ("hang_timeout", ctypes.c_double),
        ("phase", ctypes.c_int64),
        ("begun", ctypes.c_int64),
        ("since", ctypes.c_double),
        ("description", ctypes.c_char * MOST_BYTES),
        ("recent", ctypes.c_double * RECENT),
    )

    def begin(self, about: str, since: float, phase: int = INSIDE) -> None:
        """Record that an operation begins, at the time `since`; `phase`: INSIDE or PATIENT."""
        self.begun += 1
        self.phase, self.since, self.description = phase, since, about.encode()[:MOST_BYTES]
        self.recent[self.begun % RECENT] = since

    def watch(self, group: int, survives: bool, hang_timeout: float | None) -> None:
        """Have others watch this process as a member of a group from now on."""
        self.survives, self.begun = survives, 0
        self.hang_timeout = -1.0 if hang_timeout is None else hang_timeout
        self.group = group

    def leave(self, why: str) -> None:
        """Record that this process takes part in no further operation."""
        self.phase, self.since, self.description = LEFT, time.perf_counter(), why.encode()[:MOST_BYTES]

    @property
    def about(self) -> str:
        """The description of the latest operation."""
        return str(self.description, errors="replace")

    def read(self) -> ActivityReading:
        """Return what the world is doing."""
        seconds, usual = max(0.0, time.perf_counter() - self.since), None
        if self.phase in (INSIDE, PATIENT) and seconds > 0.5:  # it is needed of a rank that waits only
            numbers = range(max(0, self.begun - RECENT) + 1, self.begun + 1)
            usual = percentile([self.recent[number % RECENT] for number in numbers])
        given = None if self.hang_timeout < 0 else self.hang_timeout
        return ActivityReading(self.group, self.survives, given, self.phase, self.begun, seconds, self.about, usual)


class ActivityRecord(ctypes.Structure):
    """The memory of one process."""

    _fields_ = (
        ("pid", ctypes.c_int64),  # of the process that writes; 0 if there was none
        ("stacks", ctypes.c_int64),  # the descriptor to which it writes its stacks; -1 if it does not
        ("socket", ctypes.c_char * 64),  # the name of the abstract socket at which it answers
        ("worlds", WorldActivity * WORLDS),
    )

    @classmethod
    def mapped(cls, file: int) -> ActivityRecord:
        """Return the memory with this descriptor."""
        return cls.from_buffer(mmap.mmap(file, ctypes.sizeof(cls)))

    @classmethod
    def create(cls) -> tuple[ActivityRecord, int]:
        """Return new memory, and its descriptor, which child processes inherit. Raises OSError where there is none."""
        if not hasattr(os, "memfd_create"):
            raise OSError("no memfd_create")
        file = os.memfd_create(_NAME, 0)
        os.ftruncate(file, ctypes.sizeof(cls))
        return cls.mapped(file), file

    @classmethod
    def of(cls, pid: int) -> ActivityRecord | None:
        """Return the memory of another process of this host; None if it has none, or is another user's."""
        folder = f"/proc/{pid}/fd"
        with suppress(OSError, ValueError):
            for path in (f"{folder}/{name}" for name in os.listdir(folder)):
                if _is_record(path):
                    with open(path, "r+b") as file:
                        record = cls.mapped(file.fileno())
                    if record.pid == pid:
                        return record
        return None

    @classmethod
    def inherited(cls) -> ActivityRecord | None:
        """Return the memory that the parent of this process has created; None if it has created none."""
        file = os.environ.get(ENVIRON, "")
        if file.isdigit() and _is_record(f"/proc/self/fd/{file}"):
            with suppress(OSError, ValueError):
                return cls.mapped(int(file))
        return None

    def new_activity(self) -> WorldActivity:
        """Return a part of this record for a world; private memory if all parts are in use."""
        return next((world for world in self.worlds if not world.group), WorldActivity())

    def read(self) -> list[ActivityReading]:
        """Return what the watched worlds are doing."""
        return [world.read() for world in self.worlds if world.group]


def percentile(beginnings: Sequence[float]) -> float | None:
    """Return the 99th percentile of the seconds between operations; None if there are too few of them."""
    if len(beginnings) <= _FEWEST:
        return None
    seconds = sorted(later - earlier for earlier, later in itertools.pairwise(beginnings))
    return seconds[math.floor(_PERCENTILE * (len(seconds) - 1))]


def _is_record(path: str) -> bool:
    with suppress(OSError):
        return f"memfd:{_NAME}" in os.readlink(path)
    return False
