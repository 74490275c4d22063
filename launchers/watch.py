"""Watches the ranks of a job: finds those that keep the others waiting, reports them, and has them killed.

The parent of each rank (`supervisor.py`) tells the launcher when its rank waits in an operation. As long as a rank
does, the launcher has all parents look at their ranks, again and again, and decides by what they have seen: `hangs.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .activity import ActivityReading
from .hangs import UNSEEN, Action, GroupWait, HangDecision, Sight
from .inspection import GONE
from .verdict import ProcessState, say

REPLY_SECONDS = 3.0  # for a parent to look at its rank


class Watch:
    """The launcher's view of all ranks: `processes`, to which others are added. `send` sends a line to the parent of
    one of them, and `end` ends the job.
    """

    def __init__(
        self,
        processes: Sequence[ProcessState],
        send: Callable[[ProcessState, str], object],
        end: Callable[[], object],
    ):
        self._processes, self._send, self._end = processes, send, end
        self._seen: dict[ProcessState, Mapping[str, Any]] = {}  # the latest replies
        self._open: set[ProcessState] = set()  # of which a reply is expected
        self._waits: defaultdict[int, GroupWait] = defaultdict(GroupWait)  # by group
        self._number = 0  # of the round
        self._timer: asyncio.TimerHandle | None = None  # None: no rank waits
        self._stopped = False

    def note_wait(self) -> None:
        """Begin to look at the ranks, since one of them waits."""
        if self._timer is None and not self._stopped:
            self._look()

    def note_look(self, process: ProcessState, said: Mapping[str, Any]) -> None:
        """Record what the parent of a process has seen."""
        self._seen[process] = said
        if said["look"] == self._number:
            self._open.discard(process)
            if not self._open and self._timer is not None:
                self._timer.cancel()
                self._judge()

    def stop(self) -> None:
        """End the watch: the job has ended, or is being ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._stopped = True

    def _look(self) -> None:
        """Begin a round."""
        self._number += 1
        detailed = any(wait.wants_details for wait in self._waits.values())
        self._open = {process for process in self._processes if not process.over}
        self._timer = asyncio.get_running_loop().call_later(REPLY_SECONDS, self._judge)
        for process in self._open:
            self._send(process, f"look {self._number} {int(detailed)}")

    def _judge(self) -> None:
        """End a round: act on what was seen, and plan the next one if a rank waits."""
        groups = self._sights()
        for group, sights in groups.items():
            if decision := self._waits[group].judge(sights, time.monotonic()):
                self._act(decision)
        for group in [group for group, wait in self._waits.items() if not wait.waited or group not in groups]:
            del self._waits[group]
        soon = min((wait.next_round for wait in self._waits.values()), default=None)
        self._timer = None
        if soon is not None and not self._stopped:
            self._timer = asyncio.get_running_loop().call_later(soon, self._look)

    def _sights(self) -> dict[int, dict[ProcessState, Sight]]:
        """Return what was seen of the processes of each group."""
        groups: defaultdict[int, dict[ProcessState, Sight]] = defaultdict(dict)
        silent = {process for process in self._open if not process.over}
        for process, seen in self._seen.items():
            now = {"state": GONE} if process.over else {"state": UNSEEN, "core_time": None} if process in silent else {}
            for reading in (ActivityReading(*fields) for fields in seen["worlds"]):
                if not (process.over and reading.survives):  # else MPI itself reports its end to the others
                    groups[reading.group][process] = Sight(str(process), reading, {**seen, **now})
        for process in silent - self._seen.keys():  # in which world it is, is unknown
            for sights in groups.values():
                if process.worlds:
                    sights[process] = Sight(str(process), None, {"pid": process.pid, "state": UNSEEN})
        return groups

    def _act(self, decision: HangDecision) -> None:
        say(decision.text)
        if decision.action is Action.KILL and self._open.isdisjoint(decision.ranks):
            for process in decision.ranks:
                self._send(process, f"kill {self._seen[process]['pid']}")
        elif decision.action in (Action.KILL, Action.END):  # also if a parent does not answer, which would have to kill
            self._end()
