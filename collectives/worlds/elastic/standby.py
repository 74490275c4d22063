"""Processes in reserve: they wait, at next to no cost, until they are called in or the run is over.

They share a communicator with the workers, the job's, in which nothing is done together but meetings
(`meeting_of_all.py`). Until a meeting they are sent words:

    ready?    get ready to join, and say so
    members   these are the workers now
    meet      come to the next meeting, where it is said what it is for. By all workers, so that none can be missing
    failed    the job ends with an error

and themselves send

    ready     they could join
    told      to go: the job has to end, where it cannot go on without them

Words of before a meeting are gone with the communicator that they were sent in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

TAG = 7101
IDLE_SECONDS = 0.01  # between two looks; a look takes some microseconds
ALERT_SECONDS = 0.0005  # when a meeting is near
LOOK_AROUND_SECONDS = 1.0  # whether there is anybody left

ASK, READY, MEMBERS, MEET, FAILED, TOLD = "ready?", "ready", "members", "meet", "failed", "told"
REFUSED, CLOSED = "refused", "closed"  # to processes that were spawned, and are not let in (`recruits.py`)


class ControlMessages:
    """What processes of a job tell each other out of order, in one communicator. Whoever is dead is told nothing."""

    def __init__(self, mpi: Any, comm: Any):
        self._mpi, self._comm = mpi, comm
        self._sent: list[Any] = []  # requests, kept until the communicator goes

    def send(self, ranks: Iterable[int], word: str, content: Any = None) -> None:
        """Tell these ranks; does not wait for them."""
        for rank in ranks:
            with suppress(self._mpi.Exception):
                self._sent.append(self._comm.isend((word, content), rank, TAG))

    def heard(self) -> tuple[str, Any, int] | None:
        """The next word, what it is about, and who said it; `None` where nobody has said any."""
        status = self._mpi.Status()
        for _ in range(2):
            try:
                if not self._comm.Iprobe(self._mpi.ANY_SOURCE, TAG, status):
                    return None
                word, content = self._comm.recv(source=status.source, tag=TAG)
                return word, content, status.source
            except self._mpi.Exception:  # somebody has died since, of whom it could have come
                with suppress(self._mpi.Exception):
                    self._comm.Ack_failed()
        return None

    def dead(self, ranks: Iterable[int]) -> set[int]:
        """Those of these ranks that are known to be dead."""
        try:
            failed = self._comm.Get_failed()
        except (self._mpi.Exception, NotImplementedError):
            return set()
        dead = set(failed.Translate_ranks(None, self._comm.group)) if failed.size else set()
        return dead & set(ranks)


class StandbyLoop:
    """A process in reserve waits.

    Args:
      members: the ranks of those who work.
      build_digests: digests of what this process has built.
    """

    def __init__(self, words: ControlMessages, members: Iterable[int], build_digests: Mapping[str, str]):
        self._words, self._members, self._build_digests = words, frozenset(members), build_digests
        self._looked = time.monotonic()

    def next(self, is_ready: Callable[[], bool], told: Callable[[], bool]) -> tuple[str, Any]:
        """Wait for what ends the waiting, such as `MEET` or `FAILED`, and what it is about; or `TOLD`, once.

        Args:
          is_ready: whether this process could join.
          told: whether it was told to go.
        """
        asked = None
        while True:
            heard = self._words.heard()
            word, content, sender = heard or ("", (), None)
            if word in (MEET, FAILED, REFUSED, CLOSED):
                return word, content
            if word == MEMBERS:
                self._members = frozenset(content)
            if word == ASK:
                asked = sender
            if asked is not None and is_ready():
                self._words.send([asked], READY, dict(self._build_digests))
                asked = None
                self._alert_until = time.monotonic() + 5
            if heard is None:
                if told():
                    return TOLD, None
                self._sleep()
                if self._nobody_left():
                    return FAILED, "all workers are lost, and with them the state of the run"

    _alert_until = 0.0

    def _sleep(self) -> None:
        time.sleep(ALERT_SECONDS if time.monotonic() < self._alert_until else IDLE_SECONDS)

    def _nobody_left(self) -> bool:
        now = time.monotonic()
        if now - self._looked < LOOK_AROUND_SECONDS:
            return False
        self._looked = now
        return bool(self._members) and self._words.dead(self._members) == self._members
