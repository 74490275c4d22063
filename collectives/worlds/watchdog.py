"""A rank's part in the detection of stuck ranks: `launchers/hangs.py` has the rules.

A world shows what it is doing in memory that other processes read (`launchers/activity.py`). Under `adaptive run` the
rank's parent reads it, and the launcher decides; this process only answers when it is asked. Without the launcher, the
waiting ranks of a host read each other's memory: one of them names those of its host that are missing after
`hang_timeout`. After twice that time it kills them if the others can continue, or else ends the job.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any
from zlib import crc32

from adaptive import CollectiveError, DisagreementError
from adaptive.base.process.exit_hooks import run_exit_hooks
from adaptive.base.process.failure import FAILURE_THREAD
from adaptive.base.process.python_stacks import shortened, stack_of
from adaptive.base.process.source_lines import at
from adaptive.base.process.thread_status import IN_A_STEP, thread_status_of
from adaptive.base.process.waits import wait_of
from adaptive.base.values.numbers import real
from launchers import inspection
from launchers.activity import ActivityReading, ActivityRecord, WorldActivity
from launchers.hangs import LONGEST, Action, GroupWait, Sight

from .transport.process_group import Process

if TYPE_CHECKING:
    from .transport.transport import Transport

_SHOWN = 8
_TICK_SECONDS = 0.25
_WAITS_SECONDS = 0.75  # in an operation, before other ranks are looked at
_SECONDS_TO_ABORT = 5.0
_SECONDS_TO_PRINT = 1.0  # launchers drop what they have not printed when the job ends
_OTHER_HOSTS = 10.0  # times hang_timeout, before the job ends because of ranks that cannot be seen from here
_EXIT_STATUS = 1

_log = logging.getLogger("adaptive")


def check_hang_timeout(hang_timeout: Any) -> float | None:
    """Return `hang_timeout` as a float, in seconds; 0 disables the watchdog, None is the default (`hangs.py`).

    Raises:
      CollectiveError: it is not a number of seconds.
    """
    if hang_timeout is None:
        return None
    seconds = real(hang_timeout)
    if seconds is None or not isfinite(seconds) or seconds < 0:
        raise CollectiveError(
            f"hang_timeout={hang_timeout!r} must be the seconds after which a rank that keeps others waiting is "
            f"reported as stuck; 0 to wait without a limit; or None for the default, {LONGEST:g} s, and less for a "
            "rank that is stopped."
        )
    return seconds


def check_same(hang_timeouts: Sequence[float | None]) -> None:
    """Raise DisagreementError, on every rank, unless all ranks have the same setting."""
    if len(set(hang_timeouts)) > 1:
        words = ["the default" if seconds is None else f"{seconds:g}" for seconds in hang_timeouts[:_SHOWN]]
        given = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(words))
        rest = ", …" if len(hang_timeouts) > _SHOWN else ""
        raise DisagreementError(f"hang_timeout= is not the same on all ranks: {given}{rest}")


def be_seen(hang_timeout: float | None) -> None:
    """Let others find this process; called before they look for it. Does nothing if the watchdog is disabled."""
    if hang_timeout != 0:
        _this_process()


def pid_space() -> str:
    """Return the pid namespace of this process: containers of one host number their processes separately."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Watchdog:
    """Shows what one world of this process is doing, and where no launcher does so, watches the ranks of this host.

    Args:
      transport: the transport to watch; its `activity` is replaced by one that others can read.
      hang_timeout: the setting, in seconds; None for the default.
      abort: ends all processes of the job with an exit status; called from any thread.
    """

    def __init__(self, transport: Transport, hang_timeout: float | None, abort: Callable[[int], object]):
        self._hang_timeout, self._abort, self._pid = hang_timeout, abort, os.getpid()
        self._process = _this_process()
        self.activity = transport.activity = self._process.new_activity()
        self._watched = weakref.ref(transport, lambda _: self.close("it has dropped its world without closing it"))
        self._survives, self._wait, self._next = transport.survives, GroupWait(), 0.0
        self._seen: dict[str, tuple[int, ActivityRecord]] = {}  # the other ranks of this host, by name
        self._hidden = self._name = ""  # names of the ranks of other hosts, and of this one
        self.group = 0
        atexit.register(self._at_exit)
        self._process.watchdogs.append(self)

    def watch(self, world: Hashable, everyone: Sequence[Process], rank: int) -> None:
        """Watch the processes of a world from now on.

        Args:
          world: identifies the world, on all of them.
          everyone: the processes, by rank.
          rank: this process's rank.
        """
        self.group = crc32(repr((world, everyone)).encode()) or 1
        self.activity.watch(self.group, self._survives, self._hang_timeout)
        if not self._process.watches:
            return
        here, self._seen, hidden = everyone[rank], {}, []
        self._name = f"rank {rank} ({here})"
        for name, process in ((f"rank {n} ({each})", each) for n, each in enumerate(everyone) if each != here):
            if process.host == here.host and (record := ActivityRecord.of(process.pid)) is not None:
                self._seen[name] = process.pid, record
            else:
                hidden.append(name)
        self._hidden = ", ".join(hidden[:_SHOWN])

    def close(self, why: str = "") -> None:
        """Stop watching. If this rank leaves the others early, record the reason `why` for them."""
        if os.getpid() != self._pid or not self.group:
            return
        self.group = 0
        atexit.unregister(self._at_exit)
        with suppress(ValueError):
            self._process.watchdogs.remove(self)
        if why:
            self.activity.leave(why)
        else:
            self.activity.group = 0

    def _at_exit(self) -> None:
        """Record why this process leaves, if it ends with its world open."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        how = f"by {type(error).__name__}: {error}" if error else "at its end, or by sys.exit()"
        self.close(f"its script is over, {how}. The last that it took part in is {self.activity.about or 'none'}")

    def describe(self) -> dict[str, Any]:
        """Return what the threads that use this world are doing, as JSON: `doing`, in words; `idle`, in a step and
        nowhere else; `compiles`; `crossed`, in a collective of another world; and `stack`.
        """
        transport = self._watched()
        threads = {} if transport is None else transport.threads
        idents = [ident for ident, name in list(threads.items()) if name != FAILURE_THREAD]
        frames = sys._current_frames()
        there = [ident for ident in idents if ident in frames] or [threading.main_thread().ident or 0]
        own = [frames[ident] for ident in there if ident in frames]
        found = [thread_status_of(frame) for frame in own]
        waits = [wait for wait in map(wait_of, idents) if wait is not None]
        doing = "; ".join(dict.fromkeys([*map(str, found), *(wait.words() for wait in waits)]))
        stacks = [stack for stack in (wait.stack() for wait in waits) if stack] or [stack_of(frame) for frame in own]
        return {
            "doing": doing + at(next((each.line for each in found if each.line), "")),
            "idle": doing == IN_A_STEP,
            "compiles": any(each.compiles for each in found),
            "crossed": bool(found) and all(each.exchanges for each in found),
            "stack": shortened("\n".join(stacks)),
        }

    # --- without the launcher -----------------------------------------------------------------------------------------

    def check(self, own: ActivityReading) -> None:
        """Look at the other ranks of this host if this one waits, according to its own reading, and act on that."""
        now = time.monotonic()
        if not own.inside or own.seconds < _WAITS_SECONDS or now < self._next:
            return
        sights = {self._pid: Sight(self._name, own, {"pid": self._pid, "state": inspection.RUNS})}
        for name, (pid, record) in self._seen.items():
            seen = inspection.inspect(record, pid, self._wait.wants_details)
            reading = next((reading for reading in seen["worlds"] if reading.group == self.group), None)
            if reading is None or (seen["state"] == inspection.GONE and self._survives):
                continue
            if pid < self._pid and reading.inside and seen["state"] == inspection.RUNS:
                return  # that rank looks at the others
            sights[pid] = Sight(name, reading, seen)
        decision = self._wait.judge(sights, now)
        self._next = now + self._wait.next_round
        if decision is not None and decision.action is Action.NOTE:
            hidden = f" The ranks of other hosts cannot be seen from here: {self._hidden}." if self._hidden else ""
            _log.warning(decision.text + hidden)
        elif decision is not None:
            _log.error(decision.text)
            if decision.action is Action.KILL:
                _kill(decision.ranks)
            elif decision.action is Action.END:
                self._end(decision.ranks)
        elif self._hidden and self._wait.waited >= _OTHER_HOSTS * self._wait.longest:
            _log.error("The job ends: the ranks of other hosts cannot be seen from here.")
            self._end(())

    def _end(self, stuck: Sequence[int]) -> None:
        """End the job and this process, although other threads are blocked."""

        def end() -> None:
            run_exit_hooks()
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            with suppress(Exception):
                self._abort(_EXIT_STATUS)

        time.sleep(_SECONDS_TO_PRINT)
        # An MPI that survives losses does not end the others.
        _kill([pid for pid, _ in self._seen.values()] if self._survives else stuck)
        ending = threading.Thread(target=end, name="adaptive-abort", daemon=True)
        ending.start()
        ending.join(_SECONDS_TO_ABORT)
        os._exit(_EXIT_STATUS)


class _ThisProcess:
    """What all worlds of this process share: its record, the `watchdogs` of its worlds, and whether this process
    `watches` others, because the launcher does not.
    """

    def __init__(self) -> None:
        self.watchdogs: list[Watchdog] = []
        self._record = ActivityRecord.inherited()
        self.watches = self._record is None
        if self._record is None:
            with suppress(OSError):  # this system has no such memory
                self._record, _ = ActivityRecord.create()
        if self._record is not None:
            name = f"adaptive-{os.getpid()}-{secrets.token_hex(8)}"
            inspection.answer(name, lambda: {str(each.group): each.describe() for each in list(self.watchdogs)})
            self._record.stacks, self._record.socket = inspection.write_stacks_upon_signal(), name.encode()
            self._record.pid = os.getpid()
            if self.watches:
                threading.Thread(target=self._watch, name="adaptive-watch", daemon=True).start()

    def new_activity(self) -> WorldActivity:
        """Return the memory in which a new world shows what it is doing."""
        return WorldActivity() if self._record is None else self._record.new_activity()

    def _watch(self) -> None:
        """Watch others for all worlds of this process."""
        assert self._record is not None
        troubled = False
        while True:
            time.sleep(_TICK_SECONDS)
            try:
                readings = {reading.group: reading for reading in self._record.read()}
                for watchdog in list(self.watchdogs):
                    if watchdog.group in readings:
                        watchdog.check(readings[watchdog.group])
            except Exception:
                if not troubled:
                    troubled = True
                    _log.exception("The watchdog thread has caught an error, and continues.")


_this_process = cache(_ThisProcess)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            if ActivityRecord.of(pid) is not None:  # another process may have this pid by now
                os.kill(pid, signal.SIGKILL)
