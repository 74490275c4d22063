"""What each world of a rank is doing, in memory that other processes read without the rank's help.

A rank writes there when an operation of a world begins and ends. Its parent (`supervisor.py`) has created the memory
before the fork, and named its descriptor in the environment. A rank without such a parent creates it itself, and the
other ranks of its host find it by its name in /proc/PID/fd. The thread that performs a world's operations is the only
writer, and takes no lock: a reader may see half of an update, and reads again later.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

ENVIRON = "ADAPTIVE_ACTIVITY"  # the descriptor of the memory
_NAME = "adaptive-activity"
WORLDS = 8  # of a process; further ones are not watched
RECENT = 512  # operations whose beginnings are kept
_FEWEST = 50  # operations, before their times are used
_PERCENTILE = 0.99

_HEAD = struct.Struct("qq64s")  # pid, descriptor to which it writes stacks, name of the socket at which it answers
_WORLD = struct.Struct("qqdq")  # group, whether losses are survived, hang_timeout (negative: the default), first
_OPERATION = struct.Struct("qqd160s")  # phase, number, since when, what
_HEAD_BYTES, _OPERATION_AT, _RECENT_AT = 128, 32, 256
_WORLD_BYTES = _RECENT_AT + 8 * RECENT
_BYTES = _HEAD_BYTES + WORLDS * _WORLD_BYTES
PHASE = _OPERATION_AT // 8  # its place among the words of a world
OUTSIDE, INSIDE, PATIENT, LEFT = range(4)  # phases: PATIENT is inside an operation where the others may be late


class WorldActivity:
    """What one world of this process is doing; private memory until the world is watched.

    Args:
      memory: the world's part of a record.

    Attributes:
      begun: number of operations begun.
      show: writes the phase, `begun`, the time of the latest operation's beginning, and its description. With `recent`
        and `words`, it is for callers to whom the calls of `begin` and `end` are too many.
      recent: when the recent operations began, by their numbers modulo RECENT.
      words: the memory as integers.
    """

    def __init__(self, memory: memoryview | None = None):
        self._memory = memoryview(bytearray(_WORLD_BYTES)) if memory is None else memory
        self.words = self._memory[:_RECENT_AT].cast("q")
        self.recent = self._memory[_RECENT_AT:].cast("d")
        self.show = partial(_OPERATION.pack_into, self._memory, _OPERATION_AT)
        self.begun = 0

    def begin(self, about: bytes, since: float, phase: int = INSIDE) -> None:
        """Record that an operation begins.

        Args:
          about: its description.
          since: the present time, in seconds by `time.perf_counter`.
          phase: INSIDE or PATIENT.
        """
        self.begun = begun = self.begun + 1
        self.show(phase, begun, since, about)
        self.recent[begun % RECENT] = since

    def end(self) -> None:
        """Record that the operation is over."""
        self.words[PHASE] = OUTSIDE

    def watch(self, group: int, survives: bool, hang_timeout: float | None) -> None:
        """Have others watch this process as a member of a group from now on.

        Args:
          group: identifies the group; not 0. All its processes use the same number.
          survives: whether the others continue when a process is lost.
          hang_timeout: the setting, in seconds; None for the default.
        """
        setting = -1.0 if hang_timeout is None else hang_timeout
        _WORLD.pack_into(self._memory, 0, group, survives, setting, self.begun)

    def leave(self, why: str) -> None:
        """Record that this process takes part in no further operation."""
        self.show(LEFT, self.begun, time.perf_counter(), why.encode())

    def close(self) -> None:
        """End the watch: the world is closed."""
        self.words[0] = 0

    @property
    def about(self) -> str:
        """The description of the latest operation."""
        return _text(_OPERATION.unpack_from(self._memory, _OPERATION_AT)[3])

    @property
    def free(self) -> bool:
        """Whether no world uses this memory."""
        return self.words[0] == 0


class ActivityReading(NamedTuple):
    """What a world of a process is doing, as another process has read it.

    Attributes:
      group: identifies the processes of the world.
      survives: whether the others continue when a process is lost.
      hang_timeout: the setting, in seconds; None for the default.
      phase: OUTSIDE, INSIDE, PATIENT or LEFT.
      begun: number of operations begun.
      seconds: seconds since the latest one began.
      about: the latest operation; if the phase is LEFT, why the process has left.
      usual: the 99th percentile of the seconds between two operations; None if there were too few.
    """

    group: int
    survives: bool
    hang_timeout: float | None
    phase: int
    begun: int
    seconds: float
    about: str
    usual: float | None

    @property
    def inside(self) -> bool:
        """Whether it is in an operation."""
        return self.phase in (INSIDE, PATIENT)


class ActivityRecord:
    """The memory of one process.

    Args:
      file: its descriptor.
      readable: whether to read only.

    Attributes:
      file: the descriptor.
    """

    def __init__(self, file: int, *, readable: bool = False):
        self.file = file
        protection = mmap.PROT_READ if readable else mmap.PROT_READ | mmap.PROT_WRITE
        self._memory = memoryview(mmap.mmap(file, _BYTES, mmap.MAP_SHARED, protection))

    @classmethod
    def create(cls) -> ActivityRecord:
        """Return new memory, whose descriptor child processes inherit.

        Raises:
          OSError: this system has no such memory.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("no memfd_create")
        file = os.memfd_create(_NAME, 0)
        os.ftruncate(file, _BYTES)
        return cls(file)

    @classmethod
    def of(cls, pid: int) -> ActivityRecord | None:
        """Return the memory of another process of this host; None if it has none, or is another user's."""
        folder = f"/proc/{pid}/fd"
        with suppress(OSError):
            for name in os.listdir(folder):
                if _is_record(path := f"{folder}/{name}"):
                    file = os.open(path, os.O_RDONLY)
                    try:
                        record = cls(file, readable=True)
                    finally:
                        os.close(file)
                    if record.pid == pid:
                        return record
        return None

    @classmethod
    def inherited(cls) -> ActivityRecord | None:
        """Return the memory that the parent of this process has created; None if it has created none."""
        file = os.environ.get(ENVIRON, "")
        if file.isdigit() and _is_record(f"/proc/self/fd/{file}"):
            with suppress(OSError, ValueError):
                return cls(int(file))
        return None

    def introduce(self, pid: int, stacks: int, socket: str) -> None:
        """Record how this process is asked.

        Args:
          pid: its pid.
          stacks: descriptor of the file to which it writes its stacks; -1 if it does not.
          socket: name of its abstract socket.
        """
        _HEAD.pack_into(self._memory, 0, pid, stacks, socket.encode())

    @property
    def pid(self) -> int:
        """The pid of the process that writes; 0 if there was none."""
        return int(_HEAD.unpack_from(self._memory)[0])

    @property
    def stacks(self) -> int:
        """The descriptor of the file to which the process writes its stacks; -1 if it does not."""
        return int(_HEAD.unpack_from(self._memory)[1])

    @property
    def socket(self) -> str:
        """The name of the socket at which the process answers."""
        return _text(_HEAD.unpack_from(self._memory)[2])

    def new_activity(self) -> WorldActivity:
        """Return a part of this record for a world; private memory if all parts are in use."""
        found = (WorldActivity(part) for part in self._parts())
        return next((activity for activity in found if activity.free), None) or WorldActivity()

    def read(self) -> list[ActivityReading]:
        """Return what the watched worlds are doing."""
        return [_reading(part) for part in self._parts() if part[:8].cast("q")[0]]

    def _parts(self) -> list[memoryview]:
        starts = range(_HEAD_BYTES, _BYTES, _WORLD_BYTES)
        return [self._memory[start : start + _WORLD_BYTES] for start in starts]


def percentile(beginnings: Sequence[float]) -> float | None:
    """Return the 99th percentile of the seconds between operations; None if there are too few of them."""
    if len(beginnings) <= _FEWEST:
        return None
    seconds = sorted(later - earlier for earlier, later in itertools.pairwise(beginnings))
    return seconds[math.floor(_PERCENTILE * (len(seconds) - 1))]


def _reading(part: memoryview) -> ActivityReading:
    group, survives, setting, first = _WORLD.unpack_from(part)
    phase, begun, since, about = _OPERATION.unpack_from(part, _OPERATION_AT)
    recent = part[_RECENT_AT:].cast("d")
    seconds = max(0.0, time.perf_counter() - since)
    # Needed of a rank that waits only.
    numbers = range(max(first, begun - RECENT) + 1, begun + 1) if phase in (INSIDE, PATIENT) and seconds > 0.5 else ()
    return ActivityReading(
        group=group,
        survives=bool(survives),
        hang_timeout=None if setting < 0 else setting,
        phase=phase,
        begun=begun,
        seconds=seconds,
        about=_text(about),
        usual=percentile([recent[number % RECENT] for number in numbers]),
    )


def _is_record(path: str) -> bool:
    with suppress(OSError):
        return f"memfd:{_NAME}" in os.readlink(path)
    return False


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
