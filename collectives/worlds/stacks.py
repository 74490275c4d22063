"""What Python is doing in a process: in this one, and, where it does not answer, in another one of this host.

Who cannot answer, since C code keeps Python's lock, can still be made to write its stack down: faulthandler does so in
a signal handler, without the lock. The signal is SIGURG, which a process that has no handler for it ignores. The stack
goes to a file without a name, which leaves nothing behind, and which others find among the process's open files.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from types import FrameType
from typing import NamedTuple

import psutil

SECONDS_TO_WRITE = 1.0  # a stack
MOST_CHARACTERS = 6000  # of a stack; what is cut out is its middle
_SAME = 2.0  # seconds by which the time of a process's start may seem to differ, as clocks are set
_QUIET = 0.1  # seconds in which a stack that is being written grows

_PROGRAM = os.path.join("adaptive", "program", "program.py")

GONE, STOPPED, RUNS, UNKNOWN = "gone", "stopped", "runs", "unknown"


class ProcessId(NamedTuple):
    """How a process is known to others of its host.

    Attributes:
      host: its name.
      pid: its number.
      created: seconds since 1970; with the pid, that it is still the same process.
      space: in which its pid holds: containers of one host number their processes apart.
      file: the number of the open file to which it writes its stack upon SIGURG; -1 where it does not.
    """

    host: str
    pid: int
    created: float
    space: str
    file: int


@lru_cache(maxsize=1)
def this_process() -> ProcessId:
    """This one; from now on it writes its stack upon SIGURG, unless the program uses that signal itself."""
    pid = os.getpid()
    file = -1
    if os.path.isdir("/proc/self/fd") and signal.getsignal(signal.SIGURG) in (signal.SIG_DFL, signal.SIG_IGN):
        file, path = tempfile.mkstemp(prefix="adaptive-stack-")  # open as long as the process lives
        os.unlink(path)
        faulthandler.register(signal.SIGURG, file=file, all_threads=True)
    return ProcessId(socket.gethostname(), pid, psutil.Process(pid).create_time(), _space(), file)


def frames_of(threads: Sequence[int]) -> list[FrameType]:
    """The innermost frames of these threads of this process; of the main thread if none of them is there any more."""
    frames = sys._current_frames()
    found = [frames[thread] for thread in threads if thread in frames]
    main = threading.main_thread().ident
    return found or [frames[ident] for ident in frames if ident == main]


def stack_of(frame: FrameType) -> str:
    """A thread's stack as Python prints it, the innermost call last."""
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=True)
    summary.reverse()
    return shortened("Traceback (most recent call last):\n" + "".join(summary.format()).rstrip())


def look_at(process: ProcessId) -> tuple[str, str]:
    """Another process of this host: _PROGRAM = os.path.join("adaptive", "program", "program.py")

    GONE, STOPPED, RUNS or UNKNOWN (not to be seen from here), and its stack, as far
        as it can be had.
    """
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
    return RUNS, _written_stack(process)


def kill(process: ProcessId) -> bool:
    """End another process of this host, unless it is another by now. Returns whether it is gone, or going."""
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


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """A text without its middle, if it is long."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half].rstrip()}\n  …\n{text[-half:].lstrip()}"


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _find(process: ProcessId) -> psutil.Process | None:
    """It, if it is there, and is no other one that was given its number."""
    try:
        found = psutil.Process(process.pid)
        return found if abs(found.create_time() - process.created) < _SAME else None
    except psutil.NoSuchProcess:
        return None


def _written_stack(process: ProcessId) -> str:
    """Have it write its stack, and read that. "" where it does not, or this process may not read it."""
    if process.file < 0:
        return ""
    path = f"/proc/{process.pid}/fd/{process.file}"
    with suppress(OSError), open(path, "rb") as file:
        begin = grown = file.seek(0, os.SEEK_END)
        os.kill(process.pid, signal.SIGURG)
        until, quiet = time.monotonic() + SECONDS_TO_WRITE, 0.0
        while time.monotonic() < until and quiet < _QUIET:
            time.sleep(0.02)
            size = file.seek(0, os.SEEK_END)
            quiet = quiet + 0.02 if begin < size == grown else 0.0
            grown = size
        file.seek(begin)
        return _of_its_own(file.read().decode(errors="replace"))
    return ""


def _of_its_own(dump: str) -> str:
    """What faulthandler has written of the main thread, which comes last, and of others that are in a program."""
    threads = [block.strip() for block in dump.split("\n\n") if block.strip()]
    return shortened("\n".join([*threads[-1:], *(block for block in threads[:-1] if _PROGRAM in block)]))
