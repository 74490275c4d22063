"""Requests between watchdogs: a rank asks others for their state, or to inspect or kill a process of their host.

Each rank uses one thread, the watchdog's. While it waits for answers, it also answers requests. Datagrams may be lost
or duplicated, so requests are repeated, and answering one twice is harmless.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from . import stacks
from .core_time import CoreTime, core_time
from .findings import RankFinding, RankState
from .stacks import ProcessId
from .udp import Address, UDPSocket

_SECONDS_TO_DO = 2 * stacks.SECONDS_TO_WRITE
_TIMES = 3  # sends of a question
_HELLOS = 10
_MARKS = 20  # attempts to send a datagram to oneself

Datagram = dict[str, Any]


class Peer(NamedTuple):
    """The contact data of a rank.

    Attributes:
      number: its original rank, which does not change when ranks are renumbered; of a spawned process a random number.
      group: identifies its host: the least number of a rank there.
      addresses: the first is for ranks of the same host, the others for other hosts.
      key: authenticates datagrams; all ranks use the first one's.
    """

    number: int
    group: int
    process: ProcessId
    addresses: tuple[Address, ...]
    key: bytes
    hang_timeout: float | None


class Probe:
    """Sends this rank's requests, and answers those of others.

    Attributes:
      me: this rank.
      left: reasons of ranks that have announced that they enter no further operation, by number.
    """

    def __init__(self, peers: Sequence[Peer], own: int, socket: UDPSocket):
        self.me = peers[own]
        self.left: dict[int, str] = {}
        self._socket = socket
        socket.join(peers[0].key, self.me.number)
        self._reached = {self.me.group}  # hosts from which a datagram has arrived
        self._hellos = _HELLOS
        self._question = 0
        self._came: dict[str, dict[int, Datagram]] = {}  # datagrams since the last request, by kind and sender
        self._first: frozenset[int] = frozenset()  # all ranks that were ever in the world
        self._marks = 0  # number of the latest mark, a datagram sent to oneself to learn what was read
        self._read = 0  # number of the latest mark received
        self._mark_read = threading.Condition()
        self.keep(peers)

    def keep(self, peers: Sequence[Peer]) -> None:
        """Set the ranks of the world, including this one, in the order of their present ranks."""
        self._first |= {peer.number for peer in peers}
        self._peers = {peer.number: peer for peer in peers}  # replaced as a whole: the watchdog may be reading it

    @property
    def others(self) -> list[Peer]:
        """All other ranks of the world, in the order of their ranks."""
        return [peer for peer in self._peers.values() if peer.number != self.me.number]

    def rank(self, number: int) -> int:
        """Return the present rank of a peer, by its number."""
        return list(self._peers).index(number)

    def greet(self) -> None:
        """Send a datagram to all ranks, to learn which hosts can be reached. Others are not reported as stuck later."""
        if self._hellos:
            self._hellos -= 1
            self.send([p.number for p in self.others if p.group == p.number and p.group not in self._reached], "hello")

    # --- asking -------------------------------------------------------------------------------------------------------

    def find(self, seconds: float, here: Callable[[Datagram], None], again: float = 0.0) -> dict[int, RankFinding]:
        """Ask all other ranks for their state. Returns a finding for each, by number, in the order of ranks.

        Args:
          seconds: how long to wait for answers.
          here: handles requests that arrive meanwhile and that this class does not handle.
          again: seconds until this rank asks again, so that the others need not ask.
        """
        self._question += 1
        answers = self._came["answer"] = {}
        asked = [peer.number for peer in self.others if peer.number not in self.left]
        for _ in range(_TIMES):
            self.send(
                [number for number in asked if number not in answers], "ask", question=self._question, again=again
            )
            if self.serve(seconds / _TIMES, here, lambda: answers.keys() >= set(asked)):
                break
        found = {number: self._of_answer(number, answer) for number, answer in answers.items() if number in asked}
        runs = {number for number, finding in found.items() if finding.state.runs}
        for peer in self.others:
            if peer.number not in found:
                found[peer.number] = self._of_silence(peer, self.helper(peer.number, runs), here)
        return {peer.number: found[peer.number] for peer in self.others}

    def helper(self, number: int, runs: set[int]) -> int | None:
        """Return the number of a rank on a peer's host whose Python runs, preferably this one; None if there is none.

        Args:
          number: the peer's number.
          runs: numbers of the ranks whose Python runs.
        """
        group = self._peers[number].group
        if group == self.me.group:
            return self.me.number
        return next((p.number for p in self.others if p.group == group and p.number in runs), None)

    def request(self, helper: int, what: str, number: int, here: Callable[[Datagram], None]) -> Any:
        """Ask a rank to "look" at a process of its host, or to "kill" it. Returns its answer; None if there is none."""
        if helper == self.me.number:
            return self._do(what, number)
        done = self._came["done"] = {}
        self.send([helper], what, number=number)
        self.serve(_SECONDS_TO_DO, here, lambda: helper in done)
        return done[helper]["result"] if helper in done else None

    def request_report(self, by: int, seconds: float, here: Callable[[Datagram], None], **fields: Any) -> bool:
        """Ask a rank to log a report. Returns whether it has confirmed that."""
        heard = self._came["heard"] = {}
        for _ in range(_TIMES):
            self.send([by], "report", **fields)
            if self.serve(seconds / _TIMES, here, lambda: by in heard):
                return True
        return False

    def _of_answer(self, number: int, answer: Datagram) -> RankFinding:
        fields = {key: answer[key] for key in ("doing", "line", "seconds", "stack")}
        fields["core_time"] = _core_time(answer["core_time"])
        return RankFinding(self.rank(number), self._peers[number].process, RankState[answer["state"]], **fields)

    def _of_silence(self, peer: Peer, helper: int | None, here: Callable[[Datagram], None]) -> RankFinding:
        finding = RankFinding(self.rank(peer.number), peer.process, RankState.SILENT)
        if peer.number in self.left:
            return replace(finding, state=RankState.ENDED, doing=self.left[peer.number])
        if peer.group not in self._reached:
            return replace(finding, state=RankState.UNKNOWN)
        if helper is None:
            return replace(finding, state=RankState.CUT_OFF)
        seen, stack, account = self.request(helper, "look", peer.number, here) or (stacks.UNKNOWN, "", None)
        states = {stacks.GONE: RankState.GONE, stacks.STOPPED: RankState.STOPPED, stacks.TRACED: RankState.TRACED}
        state = states.get(seen, RankState.SILENT)
        return replace(finding, state=state, stack=stack, core_time=_core_time(account))

    # --- being asked --------------------------------------------------------------------------------------------------

    def send(self, to: Sequence[int], kind: str, **fields: Any) -> None:
        """Send a datagram to ranks, given by number, without confirmation."""
        for peer in (self._peers[number] for number in to):
            addresses = peer.addresses[:1] if peer.group == self.me.group else peer.addresses[1:]
            self._socket.send(peer.number, addresses, kind=kind, **fields)

    def serve(self, seconds: float, here: Callable[[Datagram], None], until: Callable[[], bool]) -> bool:
        """Answer requests for `seconds`, or until `until()` returns true. Returns whether it did.

        Datagrams that have arrived by then are handled, even if this process had no core for longer than `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not until():
            left = deadline - time.monotonic()
            message = self._socket.receive(left)
            if message is None:
                if left <= 0:
                    return False
                continue
            if message["from"] in self._peers:
                self._handle(message, here)
            elif message["kind"] == "stop" and message["from"] in self._first:
                here(message)  # from a rank that this one considers lost, and that considers this one lost
        return True

    def catch_up(self, seconds: float) -> bool:
        """Wait at most `seconds` until all datagrams that have already arrived are handled. Returns whether they are.

        Called by another thread than the one that serves. Sends a datagram to this rank itself, which arrives after the
        others; it is repeated, because the system drops it if the buffer is full.
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
        if what == "kill":
            return stacks.kill(process)
        state, stack = stacks.look_at(process)
        return state, stack, core_time(process.pid) if state == stacks.RUNS else None

    # --- ending -------------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Make `serve` return soon, if another thread is in it."""
        self._socket.ring()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _core_time(fields: Sequence[Any] | None) -> CoreTime | None:
    return None if fields is None else CoreTime(*fields)
