"""Python stacks of threads of this process, as text; `launchers/inspection.py` has those of other processes."""

from __future__ import annotations

import sys
import traceback
from types import FrameType

MOST_CHARACTERS = 6000  # of a stack; the middle of a longer one is cut out


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
