"""Python stacks of threads of this process, and of other processes of this host, as text.

A process whose C code holds the GIL can still write its stack: faulthandler does so in a signal handler, without the
lock. The signal is SIGURG, which processes ignore by default. The stack goes to an unlinked file, which needs no
cleanup; other processes read it through /proc/PID/fd.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from types import FrameType

SECONDS_TO_WRITE = 1.0  # a stack
MOST_CHARACTERS = 6000  # of a stack; the middle of a longer one is cut out
_QUIET = 0.1  # seconds without a new line, after which a stack is taken for complete


def stack_of(frame: FrameType, called_by: str = "") -> str:
    """Return a thread's stack as Python prints it, the innermost call last.

    Args:
      called_by: a folder. The stack begins with the innermost call in its files, if there is one.
    """
    summary = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=True)
    first = next(
        (i for i, call in enumerate(summary) if called_by and call.filename.startswith(called_by)), len(summary)
    )
    calls = traceback.StackSummary.from_list(summary[first::-1])
    return shortened("Traceback (most recent call last):\n" + "".join(calls.format()).rstrip())


def stack_of_thread(ident: int | None, called_by: str = "") -> str:
    """Return the stack of a thread of this process, or "" if it has ended. `called_by`: as for `stack_of`."""
    frame = sys._current_frames().get(ident) if ident is not None else None
    return "" if frame is None else stack_of(frame, called_by)


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text without its middle, if it is longer than `most` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half].rstrip()}\n  …\n{text[-half:].lstrip()}"


def write_stacks_upon_signal(prefix: str = "adaptive-stack-") -> int:
    """Have this process write the stacks of its threads to a file upon SIGURG.

    Returns:
      The file's descriptor, for `written_stacks`. -1 where there is no /proc, or the program uses the signal itself.
    """
    if not os.path.isdir("/proc/self/fd") or signal.getsignal(signal.SIGURG) not in (signal.SIG_DFL, signal.SIG_IGN):
        return -1
    file, path = tempfile.mkstemp(prefix=prefix)  # open as long as the process lives
    os.unlink(path)
    faulthandler.register(signal.SIGURG, file=file, all_threads=True)
    return file


def written_stacks(pid: int, file: int) -> str:
    """Have another process write its stacks, and return them, the main thread's last.

    Args:
      file: the result of `write_stacks_upon_signal` in that process.

    Returns:
      The stacks, as faulthandler writes them. "" if it writes none, or this process may not read the file.
    """
    if file < 0:
        return ""
    path = f"/proc/{pid}/fd/{file}"
    with suppress(OSError), open(path, "rb") as opened:
        begin = grown = opened.seek(0, os.SEEK_END)
        os.kill(pid, signal.SIGURG)
        until, quiet = time.monotonic() + SECONDS_TO_WRITE, 0.0
        while time.monotonic() < until and quiet < _QUIET:
            time.sleep(0.02)
            size = opened.seek(0, os.SEEK_END)
            quiet = quiet + 0.02 if begin < size == grown else 0.0
            grown = size
        opened.seek(begin)
        return opened.read().decode(errors="replace")
    return ""
