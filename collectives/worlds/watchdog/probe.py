"""Ranks ask each other where they are, and have done what only a rank of the same host can do.

All in one thread of each rank, the one that watches; what is asked while this rank waits for an answer is answered
meanwhile. Datagrams may be lost and may come twice: questions are repeated, and to answer twice is harmless.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from . import stacks
from .findings import RankFinding, RankState
from .stacks import ProcessId
from .udp import Address, UDPSocket

_SECONDS_TO_DO = 2 * stacks.SECONDS_TO_WRITE
_TIMES = 3  # that a question is sent
_HELLOS = 10
_MARKS = 20  # that are sent to oneself, until one comes

ReduceMessage = dict[str, Any]


class Peer(NamedTuple):
    """A rank as the others know it.

    Attributes:
      number: its first rank, which stays when ranks are counted anew.
      group: the same for all ranks of its host: the least of their numbers.
      addresses: the first for ranks of its host, the others for those of other hosts.
      key: what datagrams are sealed with: that of rank 0 is.
    """

    number: int
    group: int
    process: ProcessId
    addresses: tuple[Address, ...]
    key: bytes
    hang_timeout: float


class Probe:
    """This rank's part in it.

    Attributes:
      me: this rank.
      left: who has said that it will not come any more, and why.
    """

    def __init__(self, peers: Sequence[Peer], own: int, datagrams: UDPSocket):
        self.me = peers[own]
        self.left: dict[int, str] = {}
        self._datagrams = datagrams
        datagrams.join(peers[0].key, own)
        self._reached = {self.me.group}  # hosts from which something has come
        self._hellos = _HELLOS
        self._question = 0
        self._came: dict[str, dict[int, ReduceMessage]] = {}  # since the last question, by kind and sender
        self._first = frozenset(peer.number for peer in peers)
        self._marks = 0  # that this rank has sent itself, to know what it has read
        self._read = 0  # the last of them that has come back
        self._mark_read = threading.Condition()
        self.keep(peers)

    def keep(self, peers: Sequence[Peer]) -> None:
        """Those who are left, in the order of their ranks now. This one is among them."""
        self._peers = {peer.number: peer for peer in peers}  # replaced as a whole: the watching thread may be reading

    @property
    def others(self) -> list[Peer]:
        """All others that belong to the world, by rank."""
        return [peer for peer in self._peers.values() if peer.number != self.me.number]

    def rank(self, number: int) -> int:
        """The present rank of one who is known by its number."""
        return list(self._peers).index(number)

    def greet(self) -> None:
        """See which other hosts can be reached: one that never could is not taken for stuck later."""
        if self._hellos:
            self._hellos -= 1
            self.send([p.number for p in self.others if p.group == p.number and p.group not in self._reached], "hello")

    # --- asking -------------------------------------------------------------------------------------------------------

    def find(self, seconds: float, here: Callable[[ReduceMessage], None]) -> dict[int, RankFinding]:
        """What can be found out about each other rank, by number, in the order of ranks.

        Args:
          seconds: how long to wait for answers.
          here: what to do with what others ask meanwhile, where it is not for this class.
        """
        self._question += 1
        answers = self._came["answer"] = {}
        asked = [peer.number for peer in self.others if peer.number not in self.left]
        for _ in range(_TIMES):
            self.send([number for number in asked if number not in answers], "ask", question=self._question)
            if self.serve(seconds / _TIMES, here, lambda: answers.keys() >= set(asked)):
                break
        found = {number: self._of_answer(number, answer) for number, answer in answers.items() if number in asked}
        runs = {number for number, finding in found.items() if finding.state.runs}
        for peer in self.others:
            if peer.number not in found:
                found[peer.number] = self._of_silence(peer, self.helper(peer.number, runs), here)
        return {peer.number: found[peer.number] for peer in self.others}

    def helper(self, number: int, runs: set[int]) -> int | None:
        """A rank on the host of that one whose Python runs; this one, if it can be."""
        group = self._peers[number].group
        if group == self.me.group:
            return self.me.number
        return next((p.number for p in self.others if p.group == group and p.number in runs), None)

    def have_done(self, helper: int, what: str, number: int, here: Callable[[ReduceMessage], None]) -> Any:
        """Have a rank "look" at a process of its host, or "kill" it; `None` where it does not say how that went."""
        if helper == self.me.number:
            return self._do(what, number)
        done = self._came["done"] = {}
        self.send([helper], what, number=number)
        self.serve(_SECONDS_TO_DO, here, lambda: helper in done)
        return done[helper]["result"] if helper in done else None

    def have_said(self, by: int, seconds: float, here: Callable[[ReduceMessage], None], **fields: Any) -> bool:
        """Have a rank say something. Returns whether it has."""
        heard = self._came["heard"] = {}
        for _ in range(_TIMES):
            self.send([by], "report", **fields)
            if self.serve(seconds / _TIMES, here, lambda: by in heard):
                return True
        return False

    def _of_answer(self, number: int, answer: ReduceMessage) -> RankFinding:
        told = {key: answer[key] for key in ("doing", "line", "seconds", "stack")}
        return RankFinding(self.rank(number), self._peers[number].process, RankState[answer["state"]], **told)

    def _of_silence(self, peer: Peer, helper: int | None, here: Callable[[ReduceMessage], None]) -> RankFinding:
        finding = RankFinding(self.rank(peer.number), peer.process, RankState.SILENT)
        if peer.number in self.left:
            return replace(finding, state=RankState.ENDED, doing=self.left[peer.number])
        if peer.group not in self._reached:
            return replace(finding, state=RankState.UNKNOWN)
        if helper is None:
            return replace(finding, state=RankState.CUT_OFF)
        seen, stack = self.have_done(helper, "look", peer.number, here) or (stacks.UNKNOWN, "")
        states = {stacks.GONE: RankState.GONE, stacks.STOPPED: RankState.STOPPED}
        return replace(finding, state=states.get(seen, RankState.SILENT), stack=stack)

    # --- being asked --------------------------------------------------------------------------------------------------

    def send(self, to: Sequence[int], kind: str, **fields: Any) -> None:
        """Send to ranks, by number; whether it comes is not known."""
        for peer in (self._peers[number] for number in to):
            addresses = peer.addresses[:1] if peer.group == self.me.group else peer.addresses[1:]
            self._datagrams.send(peer.number, addresses, kind=kind, **fields)

    def serve(self, seconds: float, here: Callable[[ReduceMessage], None], until: Callable[[], bool]) -> bool:
        """Answer what comes, for so many seconds or until something is so. Returns whether it is."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            message = self._datagrams.receive(left)
            if message is None:
                continue
            if message["from"] in self._peers:
                self._take(message, here)
            elif message["kind"] == "stop" and message["from"] in self._first:
                here(message)  # from one that this rank takes for lost, and that has given up this rank
        return True

    def caught_up(self, seconds: float) -> bool:
        """Return whether all datagrams that have come by now are dealt with. Waits up to `seconds` until they are.

        For another thread than the one that serves. Datagrams to oneself come behind those that are there; where the
        system's buffer is full they are dropped, so they are sent again.
        """
        with self._mark_read:
            self._marks += 1
            wanted = self._marks
            for _ in range(_MARKS):
                self.send([self.me.number], "mark", mark=wanted)
                if self._mark_read.wait_for(lambda: self._read >= wanted, seconds / _MARKS):
                    return True
        return False

    def _take(self, message: ReduceMessage, here: Callable[[ReduceMessage], None]) -> None:
        sender = self._peers[message["from"]]
        self._reached.add(sender.group)
        match message["kind"]:
            case "hello":
                self.send([sender.number], "welcome")
            case "answer" if message["question"] == self._question:
                self._came["answer"][sender.number] = message
            case "done" | "heard" as kind:
                self._came.setdefault(kind, {})[sender.number] = message
            case "mark":
                with self._mark_read:
                    self._read = max(self._read, message["mark"])
                    self._mark_read.notify_all()
            case "bye":
                self.left[sender.number] = message["why"]
            case "look" | "kill" as what:
                if self._peers[message["number"]].group == self.me.group:
                    self.send([sender.number], "done", result=self._do(what, message["number"]))
            case "ask" | "report" | "stop":
                here(message)

    def _do(self, what: str, number: int) -> Any:
        process = self._peers[number].process
        return stacks.look_at(process) if what == "look" else stacks.kill(process)

    # --- ending -------------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Have `serve` return soon, in whichever thread it is."""
        self._datagrams.ring()

    def close(self) -> None:
        """Give the socket back."""
        self._datagrams.close()
