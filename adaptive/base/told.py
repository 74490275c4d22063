"""Whether this process was told to go: by SIGTERM or SIGUSR1, as schedulers do before they take a machine away.

A handler takes down that a signal has come, and nothing else. It is honoured where that can be done: between two steps
of a run. So it waits there from wherever it came: while a program is built or compiled, in `evaluate`, in a checkpoint,
in reserve. Python runs handlers in the main thread, between two of its own operations: a signal that comes while the
thread is inside MPI or XLA is taken down when it comes out.

Signals are listened for inside a world's `with` block, and in a run that keeps checkpoints. Elsewhere they do what they
always do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Told(NamedTuple):
    """What this process was told."""

    signal: str  # its name
    at: float  # of time.monotonic()

    @property
    def seconds(self) -> float:
        """How long ago."""
        return time.monotonic() - self.at


TOLD: list[Told] = []  # the first signal that this process got and has not honoured, if there is one. Local.
_open = 0  # how many `Listening` are
_before: dict[int, Any] = {}  # the handlers in whose place ours stands
_pid = 0


def told() -> Told | None:
    """The first signal that this process got and has not honoured; `None` where there is none. Local."""
    return TOLD[0] if TOLD else None


def honoured() -> None:
    """This process goes now: what it was told so far, it was told for this."""
    TOLD.clear()


class Listening:
    """From now on signals are listened for, until it is closed. Does nothing in any thread but the main one.

    A handler of one's own that was there is called, too, after ours. A signal that is ignored stays so.
    """

    def __init__(self) -> None:
        global _open, _pid
        self._counts = threading.current_thread() is threading.main_thread()
        if self._counts:
            _open += 1
            if _open == 1:
                _pid = os.getpid()
                _install()

    def close(self) -> None:
        """What was there before is there again, if nobody else listens."""
        global _open
        if self._counts:
            self._counts = False
            _open -= 1
            if _open == 0:
                _restore()

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _install() -> None:
    for number in SIGNALS:
        before = signal.getsignal(number)
        if before in (None, signal.SIG_IGN):  # None: a handler that is not Python's, and could not be put back
            continue
        _before[number] = before
        signal.signal(number, _handle)


def _restore() -> None:
    while _before:
        number, before = _before.popitem()
        with suppress(ValueError):  # a generator may be closed in another thread
            if signal.getsignal(number) is _handle:  # else somebody has put another one there
                signal.signal(number, before)


def _handle(number: int, frame: FrameType | None) -> None:
    before = _before.get(number, signal.SIG_DFL)
    if os.getpid() != _pid and not callable(before):  # a child, forked from this process, is to end as it always did
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(signal.Signals(number))
        return
    if not TOLD and os.getpid() == _pid:
        TOLD.append(Told(signal.Signals(number).name, time.monotonic()))
    if callable(before):
        before(number, frame)
