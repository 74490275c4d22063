"""The parent of a rank's process, which holds the connection to the launcher and reports how the rank ends.

A process cannot report that it was killed or that C code ended it, and cannot report at all while C code holds the
GIL. Its parent can. So a rank forks before it imports anything: the child is the rank, and the parent

* passes the child's lines on to the launcher,
* sends the child the signals that the launcher names, and the signals that the parent itself receives,
* kills the child if the launcher stops answering, or closes the connection,
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
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import NoReturn

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_NAME, _PR_SET_PDEATHSIG = 15, 1
_AT_ONCE = 1 << 16  # bytes


def supervise(ending: ModuleType, environ: Mapping[str, str], of_command: bool = False) -> socket.socket | None:
    """Fork a rank from its supervisor. Returns in the child only: the child's end of a socket to the supervisor.

    If the job was not started by `adaptive run`, the process does not fork, and None is returned.

    Args:
      ending: the module `launchers.ending`.
      environ: environment variables, which name the launcher.
      of_command: the child becomes a command, such as a shell that starts others; signals go to its process group.
    """
    launcher = ending.connect(environ)
    if launcher is None:
        return None
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
    supervisor = _Supervisor(ending, environ, launcher, ours, child, of_command)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return supervisor.run()


def _end_with(parent: int) -> None:
    """Have this process killed when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


class _Supervisor:
    """The parent's event loop. Signal handlers do nothing: Python writes the signals' numbers into a pipe."""

    def __init__(
        self,
        ending: ModuleType,
        environ: Mapping[str, str],
        launcher: socket.socket,
        rank: socket.socket,
        child: int,
        of_command: bool,
    ):
        self._whole_group = of_command and os.getpgrp() == os.getpid()
        self._ending, self._launcher, self._rank, self._child = ending, launcher, rank, child
        self._heard = b""
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGCHLD, *PASSED_ON):
            signal.signal(number, lambda number, frame: None)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, b"adaptive-rank")
        self._report(**ending.introduction(environ, child, supervised=True))

    def run(self) -> NoReturn:
        """Serve the child until it ends, and end in the same way."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._launcher, selectors.EVENT_READ, self._from_launcher)
            selector.register(self._rank, selectors.EVENT_READ, self._from_rank)
            selector.register(self._signals, selectors.EVENT_READ, self._from_signals)
            while True:
                for key, _ in selector.select():
                    if not key.data():
                        selector.unregister(key.fileobj)

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
            match line.split():
                case [b"signal", number] if self._whole_group:
                    self._send_to_group(int(number))
                case [b"signal", number]:
                    self._send(int(number))
        return bool(said)

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
