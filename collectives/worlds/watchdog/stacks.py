"""Python stacks of this process and of other processes of this host, also if their Python does not answer."""

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

from adaptive.base.python_stacks import SECONDS_TO_WRITE as SECONDS_TO_WRITE
from adaptive.base.python_stacks import shortened as shortened
from adaptive.base.python_stacks import stack_of as stack_of
from adaptive.base.python_stacks import write_stacks_upon_signal, written_stacks

if TYPE_CHECKING:
    import psutil

_SAME = 2.0  # seconds by which a process's start time may appear to change when the clock is set

_PROGRAM = os.path.join("adaptive", "program", "program.py")
_READS = re.compile(r"adaptive.data.(?!fetch_thread\.py)\w+\.py")  # a thread in fetch_thread.py alone is idle

GONE, STOPPED, TRACED, RUNS, UNKNOWN = "gone", "stopped", "traced", "runs", "unknown"


class ProcessId(NamedTuple):
    """The identity of a process, for other processes of its host.

    Attributes:
      host: the name of the host.
      pid: the process's pid.
      created: its start time, in seconds since 1970; needed because the kernel reuses pids.
      space: its pid namespace, because containers of one host number their processes separately.
      file: descriptor of the file to which it writes its stack upon SIGURG; -1 if it does not.
    """

    host: str
    pid: int
    created: float
    space: str
    file: int


@lru_cache(maxsize=1)
def this_process() -> ProcessId:
    """Return the identity of this process, and make it write its stack upon SIGURG, if the script has no handler."""
    import psutil

    pid, file = os.getpid(), write_stacks_upon_signal()
    return ProcessId(socket.gethostname(), pid, psutil.Process(pid).create_time(), _space(), file)


def frames_of(threads: Sequence[int]) -> list[FrameType]:
    """Return the innermost frames of these threads, or of the main thread if none of them is alive."""
    frames = sys._current_frames()
    found = [frames[thread] for thread in threads if thread in frames]
    main = threading.main_thread().ident
    return found or [frames[ident] for ident in frames if ident == main]


def look_at(process: ProcessId) -> tuple[str, str]:
    """Return the state of another process of this host and its stack, if available. The state is GONE, STOPPED,
    TRACED, RUNS, or UNKNOWN for a process that is not visible from here.
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
    if status == psutil.STATUS_STOPPED:
        return STOPPED, ""
    if status == psutil.STATUS_TRACING_STOP:
        return TRACED, ""
    return RUNS, _of_its_own(written_stacks(process.pid, process.file))


def kill(process: ProcessId) -> bool:
    """Kill another process of this host, unless its pid was reused. Returns whether it has ended, or will."""
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
    """Return a part of faulthandler's dump: threads that read examples, the main thread, and threads in a program."""
    *others, main = [block.strip() for block in dump.split("\n\n") if block.strip()] or [""]
    read = [block for block in others if _READS.search(block)]
    return shortened("\n".join([*read, main, *(block for block in others if _PROGRAM in block)]).strip())
