"""The thread that watches whether the others come, and what it does when they do not: the two deadlines.

See `patience.py` for the rules.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol

from adaptive.extend import FAILURE_THREAD, Wait, run_exit_hooks, thread_status_of, wait_of
from collectives.worlds.transport.operations import CLOSE, Operation

from . import stacks
from .findings import RankFinding, RankState, given_up, names, report
from .probe import Peer, Probe, ReduceMessage

_TICKS = 20  # looks in `hang_timeout`
_LONGEST_TICK = 1.0  # seconds
_ROUNDS = 4  # of asking, in `hang_timeout`
_SECONDS_TO_ANSWER = 2.0
_SECONDS_TO_ABORT = 5.0
_SECONDS_TO_END = 1.0
_SECONDS_TO_PRINT = 1.0  # a launcher drops what it has not printed yet when it ends the job
_EXIT_STATUS = 1
_HURRY = 1 / 12  # of `hang_timeout`: after this those who have said that they will not come are looked into

_log = logging.getLogger("adaptive")

Findings = dict[int, RankFinding]  # by number


class WatchedWorld(Protocol):
    """What a watch reads of its world, from another thread than the world's."""

    _operation: Operation  # the messages of a channel may share one
    _begun: int  # how many operations it has begun
    _inside: bool  # it; or behind it
    survives: bool  # the loss of ranks
    _threads: dict[int, str]  # that use the world


class Watchdog:
    """One rank's thread for one world.

    Args:
      hang_timeout: seconds.
      abort: ends all processes of the job with a status, from any thread.
    """

    def __init__(self, world: WatchedWorld, asking: Probe, hang_timeout: float, abort: Callable[[int], object]):
        self.asking = asking
        self._patience, self._abort = hang_timeout, abort
        self._watched = weakref.ref(world, lambda _: self.close("it has let go of its world without closing it"))
        self._tick = min(_LONGEST_TICK, hang_timeout / _TICKS)
        self._answer_seconds = min(_SECONDS_TO_ANSWER, max(0.5, hang_timeout / 4))
        self._pid = os.getpid()
        self._last = time.monotonic()
        self._begin()
        self._closed = self._troubled = False
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="adaptive-watch", daemon=True)
        self._thread.start()

    def keep(self, peers: Sequence[Peer]) -> None:
        """Those who are together from now on, in the order of their ranks: they begin what they are in anew."""
        self.asking.keep(peers)
        self._anew = True

    def caught_up(self) -> None:
        """Return when this rank has heard what the others had told it by now.

        For the thread of the world, before it takes others for lost: a process that was stopped for long may find that
        it is the one that was given up. It does not return from here then.
        """
        if not self._closed and threading.current_thread() is not self._thread:
            self.asking.caught_up(_SECONDS_TO_ANSWER)

    def close(self, why: str = "") -> None:
        """End. The others are told if this rank leaves them: `why`, what it does instead of coming."""
        if self._closed or os.getpid() != self._pid:  # a forked child has our socket, but is another
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if why:
            for _ in range(3):
                self.asking.send([peer.number for peer in self.asking.others], "bye", why=why)
        self.asking.ring()
        if threading.current_thread() is not self._thread:  # what it still holds is let go before the interpreter is
            self._thread.join(_SECONDS_TO_END)

    @property
    def _world(self) -> WatchedWorld:
        world = self._watched()
        if world is None:
            raise ReferenceError("the world is gone")
        return world

    def _at_exit(self) -> None:
        """The process ends while its world is open: MPI would wait for the others, and they for this one."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        how = f"by {type(error).__name__}: {error}" if error else "at its end, or by sys.exit()"
        words = getattr(self._watched(), "_operation", self._operation).about
        last = f". The last that it took part in is {words}" if words else ""
        self.close(stacks.shortened(f"its script is over, {how}{last}", 1000))

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                self.asking.serve(self._tick, self._take, lambda: self._closed)
                self._look()
            except Exception:
                if not (self._troubled or self._closed or self._anew):  # `keep` may come in between
                    self._troubled = True
                    _log.exception("The thread that watches for stuck ranks met an error, and goes on.")
                time.sleep(self._tick)
        self.asking.close()

    def _look(self) -> None:
        """Count for how long this rank has been in what it is in, and ask where the others are, if that is too long."""
        now = time.monotonic()
        away = now - self._last
        passed = min(away, 10 * self._tick)  # what is more, this process was stopped: that is nobody else's fault
        self._last = now
        inside = self._world._inside
        if self._world._begun != self._begun or self._anew:
            self._begin()
        elif inside:
            self._waited += passed
        else:
            self._idle += away
        self.asking.greet()
        hurry = not self._hurried and any(peer.number in self.asking.left for peer in self.asking.others)
        soon = max(1.0, _HURRY * self._patience)
        if inside and not self._closed and self._waited >= (min(self._next, soon) if hurry else self._next):
            self._hurried |= hurry
            self._round()

    def _begin(self) -> None:
        self._begun, self._operation, self._anew = self._world._begun, self._world._operation, False
        self._waited = 0.0  # seconds in it
        self._idle = 0.0  # seconds behind it
        self._next = self._patience  # when to ask, in seconds waited
        self._hurried = False
        self._well: dict[int, float] = {}  # when a rank was last seen to be, in seconds waited
        self._killed: dict[int, float] = {}
        self._told: set[tuple[int, int]] = set()  # what has been said of whom

    # --- the deadlines ------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Ask all, and do what is to be done."""
        findings = self.asking.find(self._answer_seconds, self._take)
        if self._anew or self._world._begun != self._begun or not self._world._inside:
            return  # all have come meanwhile
        self._next = self._waited + self._patience / _ROUNDS
        late, due = self._judge(findings)
        if due:
            self._end_or_kill(findings, due)
        elif late:
            self._say(findings, self._outlook(late), late, logging.ERROR)
        else:
            here = all(finding.state is RankState.HERE for finding in findings.values())
            rest = (
                "all ranks are in it. What they send each other takes long, or was lost" if here else "nobody is stuck"
            )
            self._say(findings, f"As far as can be told, {rest}.", findings, logging.WARNING)

    def _judge(self, findings: Findings) -> tuple[Findings, Findings]:
        """Who is stuck, and who of them is over the second deadline."""
        late, due = {}, {}
        for number, finding in findings.items():
            if finding.state.well:
                self._well[number] = self._waited
            if finding.state.well or finding.state is RankState.UNKNOWN:
                continue
            if self._operation.kind == CLOSE and finding.state in (RankState.AWAY, RankState.CROSSED):
                continue  # at the end of a world nobody needs a result, so who has more to do may take its time
            certain = finding.state is RankState.ENDED or (finding.state is RankState.GONE and not self._world.survives)
            absent = self._waited - self._well.get(number, 0.0)
            if absent >= self._patience or certain:
                late[number] = finding
                named = (logging.ERROR, number) in self._told
                if certain or (absent >= 2 * self._patience and named):
                    due[number] = finding
        if any(finding.state is not RankState.CROSSED for finding in late.values()):  # they wait for somebody else
            due = {number: finding for number, finding in due.items() if finding.state is not RankState.CROSSED}
        return late, due

    def _outlook(self, late: Findings) -> str:
        ranks = names(finding.rank for finding in late.values())
        what = f"{ranks} will be killed" if self._world.survives else "the job ends"
        return (
            f"Unless {ranks} come{'s' * (len(late) == 1)}, {what} when that is {2 * self._patience:g} s. "
            f"hang_timeout= of comm.world() sets the time ({self._patience:g} s; 0: for ever)."
        )

    def _end_or_kill(self, findings: Findings, due: Findings) -> None:
        runs = {number for number, finding in findings.items() if finding.state.runs}
        helpers = {number: self.asking.helper(number, runs) for number in due}
        ranks = names(finding.rank for finding in due.values())
        if self._world.survives and self._can_be_killed(due, helpers):
            self._say(findings, f"{ranks}: killed, and lost.", due, logging.CRITICAL)
            self._kill(helpers)
            return
        self._say(findings, f"The job ends because of {ranks}.", due, logging.CRITICAL)
        self.asking.serve(_SECONDS_TO_PRINT, self._take, lambda: False)
        # Who answers ends by itself. The others are killed, since an MPI that survives losses does not end them.
        self._kill({number: helper for number, helper in helpers.items() if number not in runs})
        given_up = {"because_of": sorted(due), "about": self._operation.about, "waited": self._waited}
        for _ in range(3):
            self.asking.send([peer.number for peer in self.asking.others], "stop", **given_up)
        self._stop()

    def _can_be_killed(self, due: Findings, helpers: dict[int, int | None]) -> bool:
        """Whether that is possible, helps, and has not been tried in vain."""
        possible = None not in helpers.values() and all(f.state is not RankState.CROSSED for f in due.values())
        return possible and all(self._waited - self._killed.get(n, self._waited) < self._patience for n in due)

    def _kill(self, helpers: dict[int, int | None]) -> None:
        for number, helper in helpers.items():
            if helper is not None:
                self._killed.setdefault(number, self._waited)
                self.asking.have_done(helper, "kill", number, self._take)

    def _stop(self) -> None:
        """End the job, and this process, whatever its other threads are in."""

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

    def _say(self, findings: Findings, rest: str, about: Iterable[int], level: int) -> None:
        """Have it printed once, by the least rank that waits, and have all others take it down. What has been said of
        all these ranks is not said again.
        """
        if not self._is_new(about, level):
            return
        words, line = self._operation.about or "telling the others of a failure", self._own_state()["line"]
        text = report(self.asking.rank(self.asking.me.number), words, line, self._waited, list(findings.values()), rest)
        waiting = [number for number, finding in findings.items() if finding.state is RankState.HERE]
        speaker = min([self.asking.me.number, *waiting], key=self.asking.rank)
        fields = {"text": text, "about": sorted(about), "level": level, "speaker": speaker}
        listening = [number for number, finding in findings.items() if finding.state.runs and number != speaker]
        self.asking.send(listening, "report", **fields)
        said = speaker != self.asking.me.number and self.asking.have_said(
            speaker, self._answer_seconds, self._take, **fields
        )
        _log.log(logging.INFO if said else min(level, logging.ERROR), text)

    def _is_new(self, about: Iterable[int], level: int) -> bool:
        said = {(level, number) for number in about}
        new = not said <= self._told
        self._told |= said
        return new

    # --- what others want ---------------------------------------------------------------------------------------------

    def _take(self, message: ReduceMessage) -> None:
        match message["kind"]:
            case "ask":
                # What follows is what this rank would do itself, so it is left to that one, as long as it does.
                self._next = max(self._next, self._waited + self._patience / _ROUNDS + self._answer_seconds)
                self.asking.send([message["from"]], "answer", question=message["question"], **self._own_state())
            case "report":
                speaks = message["speaker"] == self.asking.me.number
                if self._is_new(message["about"], message["level"]):
                    _log.log(min(message["level"], logging.ERROR) if speaks else logging.INFO, message["text"])
                if speaks:
                    self.asking.send([message["from"]], "heard")
            case "stop":
                if self.asking.me.number in message["because_of"]:
                    _log.error(given_up(message["about"], message["waited"], self._patience))
                self._stop()

    def _own_state(self) -> dict[str, Any]:
        """Where this rank is, read off the frames of the threads that use the world."""
        threads = [ident for ident, name in list(self._world._threads.items()) if name != FAILURE_THREAD]
        frames = stacks.frames_of(threads)
        found = [thread_status_of(frame) for frame in frames]
        state = RankState.AWAY
        if self._world._inside:
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
        }


def _stack_of(waits: Sequence[Wait], frames: Sequence[FrameType]) -> str:
    """The stacks of what threads wait for; of the threads themselves, where they wait for nothing that is known."""
    found = [stack for stack in (wait.stack() for wait in waits) if stack]
    return stacks.shortened("\n".join(found or map(stacks.stack_of, frames)))
