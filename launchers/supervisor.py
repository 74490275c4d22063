"""The parent of a rank's process, which holds the connection to the launcher and reports how the rank ends.

A process cannot report that it was killed or that C code ended it, and cannot report at all while C code holds the
GIL. Its parent can. So a rank forks before it imports anything: the child is the rank, and the parent

* passes the child's lines on to the launcher,
* sends the child the signals that the launcher names, and the signals that the parent itself receives,
* kills the child if the launcher stops answering, or closes the connection,
* reads what the child is doing (`activity.py`), reports that it waits for others, and examines it for the launcher,
* reports the child's exit status, or the signal that killed it, and ends in the same way, so that mpirun sees it too.

`rank.py` starts it. It imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_NAME, _PR_SET_PDEATHSIG = 15, 1
_AT_ONCE = 1 << 16  # bytes
_TICK_SECONDS = 1.0
_WAITS_SECONDS = 0.75  # in an operation, after which the launcher is told
_AGAIN_SECONDS = 10.0  # until it is told again, if it does not ask


def supervise(
    ending: ModuleType,
    activity: ModuleType,
    inspection: ModuleType,
    environ: MutableMapping[str, str],
    of_command: bool = False,
) -> socket.socket | None:
    """Fork a rank from its supervisor. Returns in the child only: the child's end of a socket to the supervisor.

    If the job was not started by `adaptive run`, the process does not fork, and None is returned.

    Args:
      ending, activity, inspection: these modules of `launchers`.
      environ: environment variables, which name the launcher. The descriptor of the child's record is added.
      of_command: the child becomes a command, such as a shell that starts others; signals go to its process group.
    """
    launcher = ending.connect(environ)
    if launcher is None:
        return None
    record = None
    with suppress(OSError):  # not on Linux: the rank is not watched
        record = activity.ActivityRecord.create()
        environ[activity.ENVIRON] = str(record.file)
    ours, theirs = socket.socketpair()
    signals = {signal.SIGCHLD, *PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until both processes have their handlers
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        ours.close()
        launcher.close()
        _end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return theirs
    theirs.close()
    watched = None if record is None else _Watched(activity, inspection, record, child)
    supervisor = _Supervisor(ending, environ, launcher, ours, child, watched, of_command)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return supervisor.run()


def _end_with(parent: int) -> None:
    """Have this process killed when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


class _Watched:
    """What the child is doing, as its parent sees it."""

    def __init__(self, activity: ModuleType, inspection: ModuleType, record: Any, child: int):
        self._activity, self._inspection, self._record, self._child = activity, inspection, record, child
        self._waits = activity.WaitClock(record)
        self._quiet_until = 0.0

    @property
    def pid(self) -> int:
        """The process that works: the child, or one that it has started."""
        return int(self._record.pid or self._child)

    def waits(self) -> bool:
        """Return whether the child waits for others and the launcher does not know yet."""
        now = time.monotonic()
        waits = any(reading.waited >= _WAITS_SECONDS for reading in self._waits.read()) and now >= self._quiet_until
        if waits:
            self._quiet_until = now + _AGAIN_SECONDS
        return waits

    def look(self, detailed: bool) -> dict[str, object]:
        """Return the fields of a `hangs.Sight`."""
        inspection, pid, readings = self._inspection, self.pid, self._waits.read()
        self._quiet_until = time.monotonic() + _AGAIN_SECONDS
        state, answers, stack = inspection.state_of(pid), {}, ""
        away = any(reading.phase == self._activity.OUTSIDE for reading in readings)
        asked = detailed and away and state == inspection.RUNS
        if asked:
            answers, stack = inspection.details(self._record, pid)
        account = inspection.core_time(pid) if away else None
        return {
            "pid": pid,
            "worlds": readings,
            "state": state,
            "at": time.monotonic(),
            "core_time": account,
            "answers": answers,
            "stack": stack,
            "asked": asked,
        }


class _Supervisor:
    """The parent's event loop. Signal handlers do nothing: Python writes the signals' numbers into a pipe."""

    def __init__(
        self,
        ending: ModuleType,
        environ: MutableMapping[str, str],
        launcher: socket.socket,
        rank: socket.socket,
        child: int,
        watched: _Watched | None,
        of_command: bool,
    ):
        self._whole_group = of_command and os.getpgrp() == os.getpid()
        self._ending, self._launcher, self._rank, self._child = ending, launcher, rank, child
        self._heard, self._watched, self._next_tick = b"", watched, time.monotonic() + _TICK_SECONDS
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGCHLD, *PASSED_ON):
            signal.signal(number, lambda number, frame: None)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, b"adaptive-rank")
        self._report(**ending.introduction(environ, child, supervisor=os.getpid()))

    def run(self) -> NoReturn:
        """Serve the child until it ends, and end in the same way."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._launcher, selectors.EVENT_READ, self._from_launcher)
            selector.register(self._rank, selectors.EVENT_READ, self._from_rank)
            selector.register(self._signals, selectors.EVENT_READ, self._from_signals)
            while True:
                for key, _ in selector.select(max(0.0, self._next_tick - time.monotonic())):
                    if not key.data():
                        selector.unregister(key.fileobj)
                self._tick()

    def _tick(self) -> None:
        """Tell the launcher if the child waits for others."""
        now = time.monotonic()
        if self._watched is not None and now >= self._next_tick:
            self._next_tick = now + _TICK_SECONDS
            if self._watched.waits():
                self._report(waits=True)

    def _from_rank(self) -> bool:
        """Pass the child's reports on to the launcher. Returns whether there may be more."""
        said = self._rank.recv(_AT_ONCE)
        with suppress(OSError):
            self._launcher.sendall(said)
        return bool(said)

    def _from_launcher(self) -> bool:
        """Send the signals that the launcher names. Returns whether there may be more."""
        why, said = None, b""
        try:
            said = self._launcher.recv(_AT_ONCE)
        except OSError as error:
            why = error
        if not said:
            with suppress(ProcessLookupError):
                self._ending.end_without_launcher(why, self._child)
        *lines, self._heard = (self._heard + said).split(b"\n")
        for line in lines:
            self._obey(line.decode().split())
        return bool(said)

    def _obey(self, words: Sequence[str]) -> None:
        match words:
            case ["signal", number] if self._whole_group:
                self._send_to_group(int(number))
            case ["signal", number]:
                self._send(int(number))
            case ["look", number, detailed] if self._watched is not None:
                self._report(look=int(number), **self._watched.look(detailed == "1"))
            case ["kill", pid]:
                with suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)

    def _from_signals(self) -> bool:
        for number in os.read(self._signals, _AT_ONCE):
            if number != signal.SIGCHLD:
                self._send(number)
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if pid:
            self._end(status)
        return True

    def _send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._child, number)

    def _send_to_group(self, number: int) -> None:
        ours = signal.signal(number, signal.SIG_IGN)
        os.killpg(0, number)
        signal.signal(number, ours)

    def _report(self, **what: object) -> None:
        with suppress(OSError):  # the launcher is gone
            self._ending.send(self._launcher, **what)

    def _end(self, status: int) -> NoReturn:
        self._rank.setblocking(False)  # the child's own children may still hold the socket open
        with suppress(BlockingIOError):
            while self._from_rank():
                pass
        if self._watched is not None:
            self._report(look=0, **self._watched.look(detailed=False))  # in which worlds it was
        if not os.WIFSIGNALED(status):
            code = os.WEXITSTATUS(status)
            self._report(exited=code)
            os._exit(code)
        number = os.WTERMSIG(status)
        self._report(killed=number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child may have left a core dump; write no second one
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(128 + number)
