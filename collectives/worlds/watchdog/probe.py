"""Questions between watchdogs: each rank asks the others for their state, or to act on a process of their host.

All in one thread of each rank, the watchdog's; questions that arrive while it waits for an answer are answered
meanwhile. Datagrams may be lost or duplicated: questions are repeated, and answering twice is harmless.
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
_TIMES = 3  # sends of a question
_HELLOS = 10
_MARKS = 20  # sends to oneself, until one arrives

Datagram = dict[str, Any]


class Peer(NamedTuple):
    """A rank as the others know it.

    Attributes:
      number: its first rank, which stays the same when ranks are renumbered.
      group: the same for all ranks of its host: the least of their numbers.
      addresses: the first for ranks of its host, the others for those of other hosts.
      key: authenticates datagrams; all use that of rank 0.
    """

    number: int
    group: int
    process: ProcessId
    addresses: tuple[Address, ...]
    key: bytes
    hang_timeout: float


class Probe:
    """The questions and answers of this rank.

    Attributes:
      me: this rank.
      left: ranks that have announced that they will not come any more, and why.
    """

    def __init__(self, peers: Sequence[Peer], own: int, socket: UDPSocket):
        self.me = peers[own]
        self.left: dict[int, str] = {}
        self._socket = socket
        socket.join(peers[0].key, own)
        self._reached = {self.me.group}  # hosts from which a datagram has arrived
        self._hellos = _HELLOS
        self._question = 0
        self._came: dict[str, dict[int, Datagram]] = {}  # since the last question, by kind and sender
        self._first = frozenset(peer.number for peer in peers)
        self._marks = 0  # number of the latest mark sent to oneself, to know what was read
        self._read = 0  # number of the latest mark received
        self._mark_read = threading.Condition()
        self.keep(peers)

    def keep(self, peers: Sequence[Peer]) -> None:
        """Know only these ranks, among them this one, in the order of their ranks now."""
        self._peers = {peer.number: peer for peer in peers}  # replaced as a whole: the watchdog may be reading it

    @property
    def others(self) -> list[Peer]:
        """All other ranks of the world, by rank."""
        return [peer for peer in self._peers.values() if peer.number != self.me.number]

    def rank(self, number: int) -> int:
        """Return the present rank of a peer, by its number."""
        return list(self._peers).index(number)

    def greet(self) -> None:
        """Find out which other hosts can be reached: one that never could is not reported as stuck later."""
        if self._hellos:
            self._hellos -= 1
            self.send([p.number for p in self.others if p.group == p.number and p.group not in self._reached], "hello")

    # --- asking -------------------------------------------------------------------------------------------------------

    def find(self, seconds: float, here: Callable[[Datagram], None]) -> dict[int, RankFinding]:
        """Return a finding for each other rank, by number, in the order of ranks.

        Args:
          seconds: how long to wait for answers.
          here: handles what others ask meanwhile, where it is not for this class.
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
        """Return a rank on the host of this peer whose Python runs, preferably this one; None if there is none."""
        group = self._peers[number].group
        if group == self.me.group:
            return self.me.number
        return next((p.number for p in self.others if p.group == group and p.number in runs), None)

    def request(self, helper: int, what: str, number: int, here: Callable[[Datagram], None]) -> Any:
        """Have a rank "look" at a process of its host, or "kill" it. Returns the result, or None without an answer."""
        if helper == self.me.number:
            return self._do(what, number)
        done = self._came["done"] = {}
        self.send([helper], what, number=number)
        self.serve(_SECONDS_TO_DO, here, lambda: helper in done)
        return done[helper]["result"] if helper in done else None

    def request_report(self, by: int, seconds: float, here: Callable[[Datagram], None], **fields: Any) -> bool:
        """Have a rank log a report. Returns whether it has."""
        heard = self._came["heard"] = {}
        for _ in range(_TIMES):
            self.send([by], "report", **fields)
            if self.serve(seconds / _TIMES, here, lambda: by in heard):
                return True
        return False

    def _of_answer(self, number: int, answer: Datagram) -> RankFinding:
        told = {key: answer[key] for key in ("doing", "line", "seconds", "stack")}
        return RankFinding(self.rank(number), self._peers[number].process, RankState[answer["state"]], **told)

    def _of_silence(self, peer: Peer, helper: int | None, here: Callable[[Datagram], None]) -> RankFinding:
        finding = RankFinding(self.rank(peer.number), peer.process, RankState.SILENT)
        if peer.number in self.left:
            return replace(finding, state=RankState.ENDED, doing=self.left[peer.number])
        if peer.group not in self._reached:
            return replace(finding, state=RankState.UNKNOWN)
        if helper is None:
            return replace(finding, state=RankState.CUT_OFF)
        seen, stack = self.request(helper, "look", peer.number, here) or (stacks.UNKNOWN, "")
        states = {stacks.GONE: RankState.GONE, stacks.STOPPED: RankState.STOPPED}
        return replace(finding, state=states.get(seen, RankState.SILENT), stack=stack)

    # --- being asked --------------------------------------------------------------------------------------------------

    def send(self, to: Sequence[int], kind: str, **fields: Any) -> None:
        """Send to ranks, by number, without confirmation."""
        for peer in (self._peers[number] for number in to):
            addresses = peer.addresses[:1] if peer.group == self.me.group else peer.addresses[1:]
            self._socket.send(peer.number, addresses, kind=kind, **fields)

    def serve(self, seconds: float, here: Callable[[Datagram], None], until: Callable[[], bool]) -> bool:
        """Answer what arrives, for so many seconds or until `until()` is true. Returns whether it is."""
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            message = self._socket.receive(left)
            if message is None:
                continue
            if message["from"] in self._peers:
                self._handle(message, here)
            elif message["kind"] == "stop" and message["from"] in self._first:
                here(message)  # from a rank that this one considers lost, and that has given up on this one
        return True

    def catch_up(self, seconds: float) -> bool:
        """Return whether all datagrams that have arrived by now are handled. Waits up to `seconds` until they are.

        Called by another thread than the one that serves. Datagrams to oneself arrive after those that are there;
        where the
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

    def _handle(self, message: Datagram, here: Callable[[Datagram], None]) -> None:
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
        """Make `serve` return soon, in whichever thread it runs."""
        self._socket.ring()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
