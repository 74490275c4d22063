"""Termination signals: SIGTERM and SIGUSR1, which schedulers send before they reclaim a machine.

The signal handler only records that a signal arrived. The program acts on it between two steps of a run. A signal that
arrives earlier (while a program is built or compiled, in `evaluate`, in a checkpoint, in reserve) stays pending until
then. Python runs handlers in the main thread, between two bytecodes: a signal that arrives while the thread is inside
MPI or XLA is recorded when that call returns.

Handlers are installed inside a world's `with` block, and in a run that keeps checkpoints. Elsewhere the signals have
their usual effect. `Interrupts` defers SIGINT, Ctrl-C.
"""

from __future__ import annotations

# `signal` calls it and converts its arguments to enums, which takes 12 µs of a step.
import _signal  # type: ignore[import-not-found]
import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class TerminationNotice(NamedTuple):
    """A termination signal that this process received."""

    signal: str  # its name
    at: float  # time.monotonic() of its arrival

    @property
    def seconds(self) -> float:
        """Seconds since the signal arrived."""
        return time.monotonic() - self.at


PENDING_TERMINATION: list[TerminationNotice] = []  # the first signal not acknowledged yet; empty or of length 1. Local.
_open = 0  # number of open `SignalHandlers`
_before: dict[int, Any] = {}  # the handlers that ours replace, by signal number
_pid = 0


def pending_termination() -> TerminationNotice | None:
    """Return the first signal that this process received and has not acknowledged, or `None`. Local."""
    return PENDING_TERMINATION[0] if PENDING_TERMINATION else None


def acknowledge_termination() -> None:
    """Clear the pending signal, because this process acts on it now."""
    PENDING_TERMINATION.clear()


class SignalHandlers:
    """Installed signal handlers, until `close`. Does nothing in any thread but the main one.

    Calls the user's own handler, if there is one, after recording the signal. An ignored signal stays ignored.
    """

    def __init__(self) -> None:
        global _open, _pid
        self._counts = threading.current_thread() is threading.main_thread()
        if self._counts:
            _open += 1
            if _open == 1:
                _pid = os.getpid()
                for number in SIGNALS:
                    before = signal.getsignal(number)
                    if before not in (None, signal.SIG_IGN):  # None: not Python's, and could not be restored
                        _before[number] = before
                        signal.signal(number, _handle)

    def close(self) -> None:
        """Restore the previous handlers, if no other `SignalHandlers` are open."""
        global _open
        if self._counts:
            self._counts = False
            _open -= 1
            while _open == 0 and _before:
                number, before = _before.popitem()
                with suppress(ValueError):  # a generator may be closed in another thread
                    if signal.getsignal(number) is _handle:  # else the user has installed another one
                        signal.signal(number, before)

    def __enter__(self) -> SignalHandlers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _handle(number: int, frame: FrameType | None) -> None:
    before = _before.get(number, signal.SIG_DFL)
    if os.getpid() != _pid and not callable(before):  # a forked child keeps the default behavior
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(signal.Signals(number))
        return
    if not PENDING_TERMINATION and os.getpid() == _pid:
        PENDING_TERMINATION.append(TerminationNotice(signal.Signals(number).name, time.monotonic()))
    if callable(before):
        before(number, frame)


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


class Interrupts:
    """Defers Ctrl-C from the commit of a program's step until the step is counted: in between, an interrupt would lose
    the state, whose memory is given to the new one, or take the same examples twice. A second Ctrl-C is not deferred.

    Attributes:
      enabled: whether `hold` has an effect. A program's loop sets it, and calls `release`; other steps are not counted.
      held: whether Ctrl-C is deferred now.
    """

    def __init__(self) -> None:
        self.enabled = self.held = self._came = False
        self._before: Any = None

    def hold(self) -> None:
        """Defer Ctrl-C. Does nothing in any thread but the main one, where alone Python raises KeyboardInterrupt."""
        if not self.enabled or self.held or (before := _signal.getsignal(signal.SIGINT)) is None:  # None: not Python's
            return
        self._before, self._came = before, False
        try:
            _signal.signal(signal.SIGINT, self._note)
        except ValueError:  # another thread
            return
        self.held = True

    def release(self) -> None:
        """End `hold`. Raises the KeyboardInterrupt that was deferred."""
        _signal.signal(signal.SIGINT, self._before)
        self.held = False
        if self._came:
            signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
