"""What Python is doing in this process and, where it does not answer, in another process of this host."""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from adaptive.extend import SECONDS_TO_WRITE as SECONDS_TO_WRITE
from adaptive.extend import shortened as shortened
from adaptive.extend import stack_of as stack_of
from adaptive.extend import write_stacks_upon_signal, written_stacks

if TYPE_CHECKING:
    import psutil

_SAME = 2.0  # seconds by which the time of a process's start may seem to differ, as clocks are set

_PROGRAM = os.path.join("adaptive", "program", "program.py")
_READS = re.compile(r"adaptive.data.(?!fetch_thread\.py)\w+\.py")  # a thread that is only in the latter is idle

GONE, STOPPED, RUNS, UNKNOWN = "gone", "stopped", "runs", "unknown"


class ProcessId(NamedTuple):
    """The identity of a process for others of its host.

    Attributes:
      host: the name of the host.
      pid: its number.
      created: seconds since 1970; the kernel reuses pids.
      space: the pid namespace: containers of one host number their processes separately.
      file: the descriptor of the file to which it writes its stack upon SIGURG; -1 where it does not.
    """

    host: str
    pid: int
    created: float
    space: str
    file: int


@lru_cache(maxsize=1)
def this_process() -> ProcessId:
    """Return the identity of this process; from now on it writes its stack upon SIGURG, unless the program uses that
    signal itself.
    """
    import psutil

    pid, file = os.getpid(), write_stacks_upon_signal()
    return ProcessId(socket.gethostname(), pid, psutil.Process(pid).create_time(), _space(), file)


def frames_of(threads: Sequence[int]) -> list[FrameType]:
    """Return the innermost frames of these threads of this process; of the main thread if none of them is alive."""
    frames = sys._current_frames()
    found = [frames[thread] for thread in threads if thread in frames]
    main = threading.main_thread().ident
    return found or [frames[ident] for ident in frames if ident == main]


def look_at(process: ProcessId) -> tuple[str, str]:
    """Return GONE, STOPPED, RUNS or UNKNOWN (not visible from here) for another process of this host, and its stack if
    available.
    """
    import psutil

    if process.space != this_process().space:
        return UNKNOWN, ""
    found = _find(process)
    if found is None:
        return GONE, ""
    try:
        status = found.status()
    except psutil.NoSuchProcess:
        return GONE, ""
    except psutil.Error:
        return UNKNOWN, ""
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return GONE, ""
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return STOPPED, ""
    return RUNS, _of_its_own(written_stacks(process.pid, process.file))


def kill(process: ProcessId) -> bool:
    """Kill another process of this host, unless its pid was reused. Returns whether it is gone, or will be."""
    import psutil

    found = _find(process) if process.space == this_process().space else None
    if found is None:
        return process.space == this_process().space
    try:
        found.kill()
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
    return True


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _find(process: ProcessId) -> psutil.Process | None:
    """Return the running process with this pid, or None if it has ended. Compares creation times, because the kernel
    reuses pids.
    """
    import psutil

    try:
        found = psutil.Process(process.pid)
        return found if abs(found.create_time() - process.created) < _SAME else None
    except psutil.NoSuchProcess:
        return None


def _of_its_own(dump: str) -> str:
    """Return, of what faulthandler wrote, the threads that read examples, the main thread, and those in a program."""
    *others, main = [block.strip() for block in dump.split("\n\n") if block.strip()] or [""]
    read = [block for block in others if _READS.search(block)]
    return shortened("\n".join([*read, main, *(block for block in others if _PROGRAM in block)]).strip())
