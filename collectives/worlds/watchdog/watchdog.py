"""The thread that detects ranks which do not enter an operation, and its two deadlines. `settings.py` has the rules."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any, Protocol

from adaptive.base.exit_hooks import run_exit_hooks
from adaptive.base.failure import FAILURE_THREAD
from adaptive.base.thread_status import thread_status_of
from adaptive.base.waits import Wait, wait_of
from collectives.worlds.transport.operations import CLOSE, Operation

from . import stacks
from .core_time import CoreWaits, core_time
from .findings import RankFinding, RankState, given_up_message, rank_names, report
from .limits import HangLimits
from .probe import Datagram, Peer, Probe

_TICKS = 20  # checks in `hang_timeout`
_LONGEST_TICK, _DEFAULT_TICK = 1.0, 0.25  # seconds
_ROUNDS = 4  # rounds of requests per `hang_timeout`
_SEEN = 1 / 4  # fraction of the limit for which a rank must be seen to do nothing before it is reported
_RARER = 1 / 8  # of the time waited: later rounds are as rare
_FIRST_ROUND = 1 / 2  # fraction of `hang_timeout` after which a first round begins the accounts of waits for a core
_SECONDS_TO_ANSWER = 2.0
_SECONDS_TO_ABORT = 5.0
_SECONDS_TO_END = 1.0
_SECONDS_TO_PRINT = 1.0  # for output: launchers drop what they have not printed when the job ends
_EXIT_STATUS = 1
_LAST = logging.CRITICAL + 1  # the level of the report that the job ends, which may follow one that ranks are killed
_HURRY = 1 / 12  # fraction of `hang_timeout` after which ranks that have announced to leave are examined

_log = logging.getLogger("adaptive")

Findings = dict[int, RankFinding]  # by number


class WatchedTransport(Protocol):
    """The attributes of a transport that the watchdog's thread reads."""

    operation: Operation  # channels use one object for all their messages
    begun: int  # number of operations begun
    inside: bool  # whether the operation is under way
    survives: bool  # whether losses of ranks are survived
    ends: deque[float]  # when the recent operations have ended
    threads: dict[int, str]  # names of the threads that use the world, by identifier


class Watchdog:
    """One rank's watchdog thread for one world.

    Args:
      transport: the transport to watch.
      probe: sends and answers requests.
      hang_timeout: the setting, in seconds; None for the default.
      abort: ends all processes of the job with an exit status; called from any thread.
    """

    def __init__(
        self,
        transport: WatchedTransport,
        probe: Probe,
        hang_timeout: float | None,
        abort: Callable[[int], object],
    ):
        self.probe = probe
        self._limits = HangLimits(hang_timeout, lambda: self._transport.ends)
        self._hang_timeout, self._abort = self._limits.longest, abort
        self._watched = weakref.ref(transport, lambda _: self.close("it has dropped its world without closing it"))
        self._tick = _DEFAULT_TICK if hang_timeout is None else min(_LONGEST_TICK, hang_timeout / _TICKS)
        self._pid = os.getpid()
        self._last = time.monotonic()
        self._reset()
        self._closed = self._troubled = False
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="adaptive-watch", daemon=True)
        self._thread.start()

    def watch_only(self, peers: Sequence[Peer]) -> None:
        """Watch these ranks from now on, in the order of their ranks; waiting times start again."""
        self.probe.keep(peers)
        self._anew = True

    def catch_up(self) -> None:
        """Wait until this rank has handled all datagrams that have already arrived.

        Called by the world's thread before it declares others lost. After a long stop, a datagram may say that the
        others have declared this process lost; then this does not return.
        """
        if not self._closed and threading.current_thread() is not self._thread:
            self.probe.catch_up(_SECONDS_TO_ANSWER)

    def close(self, why: str = "") -> None:
        """Stop the thread. If this rank leaves the others early, send them the reason `why`."""
        if self._closed or os.getpid() != self._pid:  # a forked child shares the socket
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if why:
            for _ in range(3):
                self.probe.send([peer.number for peer in self.probe.others], "bye", why=why)
        self.probe.ring()
        if threading.current_thread() is not self._thread:  # free what it holds before the interpreter ends
            self._thread.join(_SECONDS_TO_END)

    @property
    def _transport(self) -> WatchedTransport:
        transport = self._watched()
        if transport is None:
            raise ReferenceError("the world was garbage collected")
        return transport

    def _at_exit(self) -> None:
        """Close the watchdog when the process ends with its world open, and send the others the reason."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        how = f"by {type(error).__name__}: {error}" if error else "at its end, or by sys.exit()"
        words = getattr(self._watched(), "operation", self._operation).about
        last = f". The last that it took part in is {words}" if words else ""
        self.close(stacks.shortened(f"its script is over, {how}{last}", 1000))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                self.probe.serve(self._tick, self._handle, lambda: self._closed)
                self._check()
            except Exception:
                if not (self._troubled or self._closed or self._anew):  # `keep` may come in between
                    self._troubled = True
                    _log.exception("The watchdog thread has caught an error, and continues.")
                time.sleep(self._tick)
        self.probe.close()

    def _check(self) -> None:
        """Ask the other ranks for their state if this rank has been in its operation for too long."""
        now = time.monotonic()
        away = now - self._last
        passed = min(away, 10 * self._tick)  # a longer time means that this process was stopped
        self._last = now
        inside = self._transport.inside
        if self._transport.begun != self._begun or self._anew:
            self._reset()
        elif inside:
            self._waited += passed
        else:
            self._idle += away
        self.probe.greet()
        hurry = not self._hurried and any(peer.number in self.probe.left for peer in self.probe.others)
        soon = max(1.0, _HURRY * self._hang_timeout)
        if inside and not self._closed and self._waited >= (min(self._next, soon) if hurry else self._next):
            self._hurried |= hurry
            self._round()

    def _reset(self) -> None:
        self._begun, self._operation, self._anew = self._transport.begun, self._transport.operation, False
        self._waited = 0.0  # seconds in the operation
        self._idle = 0.0  # seconds since the operation
        self._shortest = self._limits.least  # limit for a rank that does nothing
        self._next = _FIRST_ROUND * self._shortest  # when to ask, in seconds waited
        self._hurried = False
        self._well: dict[int, float] = {}  # when each rank was last well, in seconds waited
        self._core_waits = CoreWaits(self._hang_timeout)
        self._nothing: dict[int, float] = {}  # since when each rank is known to do nothing, in seconds waited
        self._killed: dict[int, float] = {}
        self._reported: set[tuple[int, int]] = set()  # (level, rank) of what was reported

    # --- the deadlines ------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Ask all ranks for their state, and act on it."""
        if self._waited < self._shortest:
            self._shortest = self._limits.shortest()
            self._next = _FIRST_ROUND * self._shortest
            if self._waited < self._next and not self._hurried:
                return
        self._next = self._next_round()
        findings = self.probe.find(self._answer_seconds, self._handle, self._next - self._waited)
        if self._completed():
            return
        findings = self._with_core_use(findings)
        late, due = self._judge(findings)
        if due:
            self._end_or_kill(findings, due)
        elif late:
            self._report(findings, self._outlook(late), late, logging.ERROR)
        elif self._waited >= self._hang_timeout:
            here = all(finding.state is RankState.HERE for finding in findings.values())
            rest = "all ranks are in it; its messages are slow, or were lost" if here else "no rank is stuck"
            self._report(findings, f"As far as is known, {rest}.", findings, logging.WARNING)

    def _next_round(self) -> float:
        """Return when to ask after the present round, in seconds waited."""
        if self._waited < self._shortest:
            return self._shortest
        after = self._waited + max(self._shortest / _ROUNDS, _RARER * self._waited)
        deadlines = 2 * self._shortest, self._hang_timeout
        return min([after, *(deadline for deadline in deadlines if self._waited < deadline)])

    @property
    def _answer_seconds(self) -> float:
        return min(_SECONDS_TO_ANSWER, max(0.5, max(self._shortest, self._waited) / 4))

    def _completed(self) -> bool:
        """Return whether the operation is complete, or this rank has left it."""
        return self._anew or self._transport.begun != self._begun or not self._transport.inside

    def _with_core_use(self, findings: Findings) -> Findings:
        """Return the findings with each rank's use of cores since its last account."""
        now, found = time.monotonic(), {}
        for number, finding in findings.items():
            if finding.state.well:
                self._core_waits.forget(number)
            elif finding.core_time is not None:
                finding = replace(finding, core_use=self._core_waits.add(number, now, finding.core_time))
            found[number] = finding
        return found

    def _judge(self, findings: Findings) -> tuple[Findings, Findings]:
        """Return the findings of ranks that are past the first deadline, and of those past the second."""
        late, due = {}, {}
        for number, finding in findings.items():
            if finding.state.well:
                self._well[number] = self._waited
            if finding.state.well or finding.state is RankState.UNKNOWN:
                continue
            if self._operation.kind == CLOSE and finding.state in (RankState.AWAY, RankState.CROSSED):
                continue  # at the end of a world no rank waits for a result, so the others may be late
            certain = finding.state is RankState.ENDED or (
                finding.state is RankState.GONE and not self._transport.survives
            )
            times = self._times_of_limit(number, finding)
            if times >= 1 or certain:
                late[number] = finding
                named = (logging.ERROR, number) in self._reported
                if certain or (times >= 2 and named):
                    due[number] = finding
        if any(finding.state is not RankState.CROSSED for finding in late.values()):  # they wait for another rank
            due = {number: finding for number, finding in due.items() if finding.state is not RankState.CROSSED}
        return late, due

    def _times_of_limit(self, number: int, finding: RankFinding) -> float:
        """Return how long the others have waited for a rank, in multiples of the limit that applies to it.

        A rank that does nothing must be found so again and again: for a quarter of the limit before it is reported, and
        for the whole limit before it is killed. A single look may be a coincidence. Where the loss of a rank ends the
        job, that takes as long as for other ranks.
        """
        absent = self._waited - self._well.get(number, 0.0) - self._core_waits.excused(number)
        times = absent / self._hang_timeout
        if not finding.does_nothing:
            self._nothing.pop(number, None)
            return times
        seen = self._waited - self._nothing.setdefault(number, self._waited)
        if seen < _SEEN * self._shortest:
            return times
        short = absent / self._shortest
        return max(times, short if seen >= self._shortest and self._transport.survives else min(short, 1.0))

    def _outlook(self, late: Findings) -> str:
        ranks = rank_names(finding.rank for finding in late.values())
        what = f"{ranks} will be killed" if self._transport.survives else "the job ends"
        soon = self._transport.survives and all(finding.does_nothing for finding in late.values())
        until = 2 * (self._shortest if soon else self._hang_timeout)
        without = ", without waits for a core" * any(self._core_waits.excused(number) > 0 for number in late)
        return (
            f"Unless {ranks} come{'s' * (len(late) == 1)}, {what} when that is {until:.3g} s{without}. "
            f"{self._limits.describe(self._shortest)}"
        )

    def _end_or_kill(self, findings: Findings, due: Findings) -> None:
        runs = {number for number, finding in findings.items() if finding.state.runs}
        helpers = {number: self.probe.helper(number, runs) for number in due}
        ranks = rank_names(finding.rank for finding in due.values())
        if self._transport.survives and self._can_be_killed(due, helpers):
            self._kill(helpers)  # before the report, which takes time in which the ranks may come
            self._report(findings, f"{ranks}: killed, and lost.", due, logging.CRITICAL)
            return
        self._report(findings, f"The job ends because of {ranks}.", due, _LAST)
        self.probe.serve(_SECONDS_TO_PRINT, self._handle, lambda: False)
        # Ranks that answer end by themselves. The others are killed: an MPI that survives losses does not end them.
        self._kill({number: helper for number, helper in helpers.items() if number not in runs})
        given_up = {"because_of": sorted(due), "about": self._operation.about, "waited": self._waited}
        for _ in range(3):
            self.probe.send([peer.number for peer in self.probe.others], "stop", **given_up)
        self._stop()

    def _can_be_killed(self, due: Findings, helpers: dict[int, int | None]) -> bool:
        """Return whether killing these ranks is possible and helps, and has not failed before."""
        possible = None not in helpers.values() and all(f.state is not RankState.CROSSED for f in due.values())
        return possible and all(self._waited - self._killed.get(n, self._waited) < self._hang_timeout for n in due)

    def _kill(self, helpers: dict[int, int | None]) -> None:
        for number, helper in helpers.items():
            if helper is not None:
                self._killed.setdefault(number, self._waited)
                self.probe.request(helper, "kill", number, self._handle)

    def _stop(self) -> None:
        """End the job and this process, even if other threads are blocked."""

        def end() -> None:
            run_exit_hooks()
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            with suppress(Exception):
                self._abort(_EXIT_STATUS)

        ending = threading.Thread(target=end, name="adaptive-abort", daemon=True)
        ending.start()
        ending.join(_SECONDS_TO_ABORT)
        os._exit(_EXIT_STATUS)

    # --- saying it ----------------------------------------------------------------------------------------------------

    def _report(self, findings: Findings, rest: str, about: Iterable[int], level: int) -> None:
        """Have the least waiting rank log a report, and all others record it. Does nothing if `about` is not new."""
        if not self._is_new(about, level):
            return
        words, line = self._operation.about or "reporting a failure to the others", self._own_state()["line"]
        text = report(self.probe.rank(self.probe.me.number), words, line, self._waited, list(findings.values()), rest)
        waiting = [number for number, finding in findings.items() if finding.state is RankState.HERE]
        speaker = min([self.probe.me.number, *waiting], key=self.probe.rank)
        fields = {"text": text, "about": sorted(about), "level": level, "speaker": speaker}
        listening = [number for number, finding in findings.items() if finding.state.runs and number != speaker]
        self.probe.send(listening, "report", **fields)
        said = speaker != self.probe.me.number and self.probe.request_report(
            speaker, self._answer_seconds, self._handle, **fields
        )
        _log.log(logging.INFO if said else min(level, logging.ERROR), text)

    def _is_new(self, about: Iterable[int], level: int) -> bool:
        said = {(level, number) for number in about}
        new = not said <= self._reported
        self._reported |= said
        return new

    # --- what others want ---------------------------------------------------------------------------------------------

    def _handle(self, message: Datagram) -> None:
        match message["kind"]:
            case "ask":
                # The rank that asks will act on the answers, so this one need not ask.
                self._next = max(self._next, self._waited + message["again"] + self._answer_seconds)
                self.probe.send([message["from"]], "answer", question=message["question"], **self._own_state())
            case "report":
                speaks = message["speaker"] == self.probe.me.number
                if self._is_new(message["about"], message["level"]):
                    _log.log(min(message["level"], logging.ERROR) if speaks else logging.INFO, message["text"])
                if speaks:
                    self.probe.send([message["from"]], "heard")
            case "stop":
                if self.probe.me.number in message["because_of"]:
                    _log.error(given_up_message(message["about"], message["waited"], self._hang_timeout))
                self._stop()

    def _own_state(self) -> dict[str, Any]:
        """Return this rank's state, from the frames of the threads that use the world."""
        threads = [ident for ident, name in list(self._transport.threads.items()) if name != FAILURE_THREAD]
        frames = stacks.frames_of(threads)
        found = [thread_status_of(frame) for frame in frames]
        state = RankState.AWAY
        if self._transport.inside:
            state = RankState.HERE
        elif any(each.compiles for each in found):
            state = RankState.COMPILES
        elif found and all(each.exchanges for each in found):
            state = RankState.CROSSED
        waits = [] if state.well else [wait for wait in map(wait_of, threads) if wait is not None]
        return {
            "state": state.name,
            "doing": "; ".join(dict.fromkeys([*map(str, found), *(wait.words() for wait in waits)])),
            "line": next((each.line for each in found if each.line), ""),
            "seconds": self._idle,
            "stack": "" if state.well else _stack_of(waits, frames),
            "core_time": None if state.well else core_time(self._pid, threading.get_native_id()),
        }


def _stack_of(waits: Sequence[Wait], frames: Sequence[FrameType]) -> str:
    """Return the stacks of the threads that `waits` names as blocking, or else of the waiting threads themselves."""
    found = [stack for stack in (wait.stack() for wait in waits) if stack]
    return stacks.shortened("\n".join(found or map(stacks.stack_of, frames)))
