"""The parent of a rank's process, which holds the connection to the launcher and reports how the rank ends.

A process cannot report that it was killed or that C code ended it, and cannot report at all while C code holds the
GIL. Its parent can. So a rank forks before it imports anything: the child is the rank, and the parent

* passes the child's lines on to the launcher (`ending.py` has the fields),
* sends the child the signals that the launcher names, and the signals that the parent itself receives,
* kills the child if the launcher's host stops answering, or closes the connection: it has ended the job, and may have
  started it again on other hosts,
* reads what the child is doing (`activity.py`), reports that it waits for others, and examines it for the launcher,
* reports the child's exit status, or the signal that killed it, and ends in the same way, so that mpirun sees it too.

The launcher sends lines of words:

    signal NUMBER            send this signal to the child, so that signals reach the job's processes on all hosts
    look NUMBER DETAILED     report what the child is doing, with the number of this request; DETAILED: 0 or 1
    kill PID                 kill a process of this host

`rank.py` starts it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import NoReturn

from . import activity, ending, inspection
from .resources import number_in

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_DEADLY = (*PASSED_ON, signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL, signal.SIGSEGV)
CONNECT_SECONDS = 3.0
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_PR_SET_NAME, _PR_SET_PDEATHSIG = 15, 1
_AT_ONCE = 1 << 16  # bytes
_TICK_SECONDS = 1.0
_SIGNALS = 128  # exit codes above are 128 + the signal that killed a process
_WAITS_SECONDS = 0.75  # in an operation, after which the launcher is told


def supervise(environ: MutableMapping[str, str], of_command: bool = False) -> None:
    """Fork a rank from its supervisor, and return in the child only. Does nothing without a launcher in `environ`, to
    which the child's descriptors are added. `of_command`: signals go to the process group of the child, a command.
    """
    launcher = connect(environ)
    if launcher is None:
        return
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), of_command)
    environ[ending.SUPERVISOR] = f"{theirs.fileno()} {os.fstat(theirs.fileno()).st_ino}"
    record = None
    with suppress(OSError):  # not on Linux: the rank is not watched
        record, file = activity.ActivityRecord.create()
        environ[activity.ENVIRON] = str(file)
    signals = {signal.SIGCHLD, *PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until both processes have their handlers
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        ours.close()
        launcher.close()
        end_with(parent, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.detach()  # `ending.prepare` uses it
        return
    theirs.close()
    supervisor = _Supervisor(record, launcher, ours, child, of_command)
    rank = number_in(environ, _RANKS) or 0
    supervisor.report(
        token=environ[ending.LAUNCHER].split()[0],
        rank=rank,
        size=number_in(environ, _SIZES) or rank + 1,
        job=environ.get("PMIX_NAMESPACE", ""),
        spawned=ending.SPAWNED in environ,
        is_command=of_command,
        host=socket.gethostname(),
        pid=child,
    )
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    supervisor.run()


def end_with(parent: int, number: int) -> None:
    """Have this process receive a signal when its parent dies; also if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


def connect(environ: Mapping[str, str]) -> socket.socket | None:
    """Return a connection to `adaptive run`; None if it did not start this job or cannot be reached.

    Raises:
      SystemExit: it was on this host, and has ended: the job is over, and nobody would end this rank.
    """
    token, seconds, host, *addresses = environ.get(ending.LAUNCHER, "").split() or ["", "", ""]
    rank = number_in(environ, _RANKS)
    if not token or rank is None:
        return None
    here = socket.gethostname() == host
    for address in sorted(addresses, key=lambda a: a.startswith("127.") != here):  # loopback first, or last
        name, _, port = address.rpartition(":")
        with suppress(OSError):
            line = socket.create_connection((name, int(port)), timeout=CONNECT_SECONDS)
            line.settimeout(None)
            ending.give_up_after(line, float(seconds))
            return line
    if here:
        raise SystemExit(f"rank {rank}: its launcher has ended")
    sys.stderr.write(f"rank {rank} cannot reach its launcher on {host} at {', '.join(addresses)}\n")
    return None


class _Supervisor:
    """The parent's event loop. Signal handlers do nothing: Python writes the signals' numbers into a pipe."""

    def __init__(
        self,
        record: activity.ActivityRecord | None,
        launcher: socket.socket,
        rank: socket.socket,
        child: int,
        of_command: bool,
    ):
        self._record, self._launcher, self._rank = record, launcher, rank
        self._child, self._of_command = child, of_command
        self._heard = self._said = b""  # beginnings of lines, of the launcher and of the child
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup)
        for number in (signal.SIGCHLD, *PASSED_ON):
            signal.signal(number, lambda number, frame: None)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, b"adaptive-rank")

    def run(self) -> NoReturn:
        """Serve the child until it ends, and end in the same way."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._launcher, selectors.EVENT_READ, self._from_launcher)
            selector.register(self._rank, selectors.EVENT_READ, self._from_rank)
            selector.register(self._signals, selectors.EVENT_READ, self._from_signals)
            tick = time.monotonic() + _TICK_SECONDS
            while True:
                for key, _ in selector.select(max(0.0, tick - time.monotonic())):
                    if not key.data():
                        selector.unregister(key.fileobj)
                if time.monotonic() >= tick:
                    tick = time.monotonic() + _TICK_SECONDS
                    readings = [] if self._record is None else self._record.read()
                    if any(reading.inside and reading.seconds >= _WAITS_SECONDS for reading in readings):
                        self.report(waits=True)

    def _look(self, number: int, detailed: bool) -> None:
        """Report what the child is doing."""
        if self._record is not None:
            pid = int(self._record.pid or self._child)  # the child may be a command that has started what works
            self.report(look=number, **inspection.inspect(self._record, pid, detailed))

    def _from_rank(self) -> bool:
        """Pass the child's reports on to the launcher. Returns whether there may be more, as the next functions do."""
        said = self._rank.recv(_AT_ONCE)
        lines, end, self._said = (self._said + said).rpartition(b"\n")  # whole ones, between which this process reports
        with suppress(OSError):
            self._launcher.sendall(lines + end)
        return bool(said)

    def _from_launcher(self) -> bool:
        """Do what the launcher says; kill the child if there is none."""
        said = b""
        try:
            said = self._launcher.recv(_AT_ONCE)
        except ConnectionError:  # it has been killed
            pass
        except OSError as error:
            sys.stderr.write(f"pid {self._child} on {socket.gethostname()} is cut off from its launcher ({error})\n")
        if not said:
            self._send(signal.SIGKILL)
        *lines, self._heard = (self._heard + said).split(b"\n")
        for line in lines:
            self._obey(line.decode().split())
        return bool(said)

    def _obey(self, words: Sequence[str]) -> None:
        match words:
            case ["signal", number] if self._of_command and os.getpgrp() == os.getpid():  # also what it has started
                ours = signal.signal(int(number), signal.SIG_IGN)
                os.killpg(0, int(number))
                signal.signal(int(number), ours)
            case ["signal", number]:
                self._send(int(number))
            case ["look", number, detailed]:
                self._look(int(number), detailed == "1")
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

    def report(self, **what: object) -> None:
        """Send a line to the launcher."""
        with suppress(OSError):  # it is gone
            self._launcher.sendall(json.dumps(what).encode() + b"\n")

    def _end(self, status: int) -> NoReturn:
        self._rank.setblocking(False)  # the child's own children may still hold the socket open
        with suppress(BlockingIOError):
            while self._from_rank():
                pass
        self._look(0, detailed=False)  # in which worlds it was
        number, code = os.WTERMSIG(status), os.WEXITSTATUS(status)
        if self._of_command and code - _SIGNALS in _DEADLY:  # so a shell ends whose program was killed
            number = code - _SIGNALS
        if not number:
            self.report(exited=code)
            os._exit(code)
        self.report(killed=number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child may have left a core dump; write no second one
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        os._exit(_SIGNALS + number)
