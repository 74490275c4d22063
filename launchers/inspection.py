"""What a process of this host does: whether it is stopped, how it uses cores, what it answers, and its stack.

A process without a core makes no progress, like one that hangs. Linux tells them apart: a thread that is ready to run
and has no core is in its run queue, and `/proc/PID/task/TID/schedstat` counts that time. A thread that is stopped,
sleeps or waits for a lock is in no run queue.

A process answers at a socket, by a thread that needs Python's lock. If C code holds the lock, faulthandler still writes
the stack, in the handler of a signal: SIGURG, which processes ignore by default.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .activity import ActivityRecord

GONE, STOPPED, RUNS = "gone", "stopped", "runs"
_MOST_CHARACTERS = 6000  # of a stack
_STATES = {"T": STOPPED, "Z": GONE, "X": GONE}  # the kernel's letters
_NOTABLE, _HOUSEKEEPING = 0.1, 0.02  # fractions of the time
_ANSWER_SECONDS = 0.5
_QUIET = 0.1  # seconds without a new line, after which a stack is taken for complete
_WRITE_TRIES = 10
_PROGRAM = os.path.join("adaptive", "program", "program.py")
_READS = re.compile(r"adaptive.data.(?!readers\.py)\w+\.py")  # a thread in readers.py alone is idle
_COMPILES = os.path.join("jax", "_src", "compiler.py")


class CoreTime(NamedTuple):
    """The kernel's account of a process up to a time, or between two times: sums over its threads, in seconds."""

    seconds: float = 0.0  # the time by a clock of its host, or between the two; 0 if there was no earlier account
    ran: float = 0.0  # for which threads ran on a core
    queued: float = 0.0  # for which threads were ready to run and had no core

    def since(self, earlier: CoreTime) -> CoreTime:
        """Return the use of cores since an earlier account; waits of several threads count once."""
        seconds = self.seconds - earlier.seconds
        ran, queued = (max(0.0, own - other) for own, other in zip(self[1:], earlier[1:], strict=True))  # threads end
        return CoreTime(seconds, ran, min(queued, seconds))

    @property
    def waits(self) -> bool:
        """Whether waits for a core are a notable part of the time between two accounts."""
        return self.queued > _NOTABLE * self.seconds

    @property
    def sleeps(self) -> bool:
        """Whether the process neither ran nor waited for a core between two accounts, but for its housekeeping."""
        return self.seconds > 0 and self.ran + self.queued < _HOUSEKEEPING * self.seconds


def core_time(pid: int) -> CoreTime | None:
    """Return the account of a process of this host, or None if the kernel has none, as outside Linux."""
    accounts = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError):  # the thread has ended
                accounts.append([int(word) for word in _text(f"/proc/{pid}/task/{thread}/schedstat").split()])
    if not accounts:
        return None
    return CoreTime(time.monotonic(), *(1e-9 * sum(each) for each in list(zip(*accounts, strict=True))[:2]))


def state_of(pid: int) -> str:
    """Return the state of a process of this host: GONE, STOPPED or RUNS."""
    try:
        return _STATES.get(_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[0], RUNS)
    except (OSError, IndexError):
        return GONE


def inspect(record: ActivityRecord, pid: int, detailed: bool) -> dict[str, Any]:
    """Return what a process of this host is doing, as fields of JSON; `record`: its record. If `detailed`, a running
    process that is outside of operations is asked what it is doing, which takes up to two seconds.

    Returns:
      pid, worlds: the pid, and what each watched world is doing (`ActivityReading`).
      state: GONE, STOPPED or RUNS.
      core_time: the kernel's account; None if it is inside all operations.
      answers: what it says of its worlds, by group (`Watchdog.describe`).
      stack: its stack as faulthandler writes it, if it does not answer.
      asked: whether it was asked.
    """
    worlds, state = record.read(), state_of(pid)
    asked = detailed and state == RUNS and not all(reading.inside for reading in worlds)
    answers = ask(str(record.socket, "utf8")) if asked else {}
    stack = written_stacks(pid, record.stacks) if asked and not answers else ""
    before, worlds = worlds, record.read()
    if [reading[:5] for reading in before] != [reading[:5] for reading in worlds]:  # it has moved on since
        asked, answers, stack = False, {}, ""
    away = not all(reading.inside for reading in worlds)
    found = {"pid": pid, "worlds": worlds, "state": state, "answers": answers, "stack": stack, "asked": asked}
    return {**found, "core_time": core_time(pid) if away else None}


# --- asking -----------------------------------------------------------------------------------------------------------


def ask(name: str) -> dict[str, dict[str, Any]]:
    """Return the answer of the process with this socket; empty if it does not answer in time."""
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(_ANSWER_SECONDS)
        line.connect(f"\0{name}")
        with line.makefile("r") as lines:
            return dict(json.loads(lines.readline()))
    return {}


def answer(name: str, says: Callable[[], dict[str, dict[str, Any]]]) -> None:
    """Answer each connection to the abstract socket of this name with what `says` returns, from now on, in a thread."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(f"\0{name}")
    server.listen()

    def run() -> None:
        while True:
            line, _ = server.accept()
            with suppress(OSError), line:
                line.settimeout(_ANSWER_SECONDS)
                line.sendall(json.dumps(says()).encode() + b"\n")

    threading.Thread(target=run, name="adaptive-answers", daemon=True).start()


# --- stacks -----------------------------------------------------------------------------------------------------------


def write_stacks_upon_signal() -> int:
    """Have this process write the stacks of its threads to memory upon SIGURG. Returns the memory's descriptor; -1 on
    other systems than Linux, or if the program uses the signal itself.
    """
    if not hasattr(os, "memfd_create") or signal.getsignal(signal.SIGURG) not in (signal.SIG_DFL, signal.SIG_IGN):
        return -1
    file = os.memfd_create("adaptive-stacks")
    faulthandler.register(signal.SIGURG, file=file, all_threads=True)
    return file


def written_stacks(pid: int, file: int) -> str:
    """Have another process write its stacks, and return those that matter: readers, the main thread, and programs. ""
    if it writes none. `file`: what `write_stacks_upon_signal` has returned there.
    """
    if file < 0:
        return ""
    with suppress(OSError), open(f"/proc/{pid}/fd/{file}", "rb") as opened:
        begin = size = opened.seek(0, os.SEEK_END)
        os.kill(pid, signal.SIGURG)
        for _ in range(_WRITE_TRIES):
            time.sleep(_QUIET)
            before, size = size, opened.seek(0, os.SEEK_END)
            if begin < before == size:
                break
        opened.seek(begin)
        dump = opened.read().decode(errors="replace")
        *others, main = [block.strip() for block in dump.split("\n\n") if block.strip()] or [""]
        found = [*filter(_READS.search, others), main, *(block for block in others if _PROGRAM in block)]
        return "\n".join(found).strip()[:_MOST_CHARACTERS]
    return ""


def compiles(stack: str) -> bool:
    """Return whether a stack is in XLA's compiler."""
    return _COMPILES in stack


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()
