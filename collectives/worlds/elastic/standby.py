"""Processes on standby: they wait, using little processor time, until they are asked to join or the run is over.

They share a communicator of all processes with the workers, whose only collective is `rendezvous`. Between two
rendezvous they receive control messages:

    ready?      get ready to join, and answer `ready`
    meet        come to the rendezvous; sent by every worker, because any one of them may die
    failed      the job ends with an error
    dismissed   to a spawned process: it is not admitted

and send

    ready       this process can join

Messages sent before a rendezvous are discarded with the communicator that they were sent in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

TAG = 7101
IDLE_SECONDS = 0.01  # between two polls; a poll takes some microseconds
ALERT_SECONDS = 0.0005  # when a rendezvous is near
SECONDS_BETWEEN_CHECKS = 0.1  # between two checks that a worker is alive

ASK, READY, MEET, FAILED, DISMISSED = "ready?", "ready", "meet", "failed", "dismissed"
ALL_LOST, TERMINATED = "all lost", "terminated"  # what a process on standby finds, instead of receiving it
WORKERS_LOST = (
    "all workers are lost, and with them the state of the run. The run starts anew from its last checkpoint if the "
    "driver calls program.restore(…, missing_ok=True) and the job is started by:  adaptive run --restarts 3 …"
)


class ControlMessages:
    """Point-to-point messages in one communicator, beside its collectives. Messages to dead processes are dropped."""

    def __init__(self, mpi: Any, comm: Any):
        self._mpi, self._comm = mpi, comm
        self._sent: list[Any] = []  # requests, kept as long as the communicator

    def send(self, ranks: Iterable[int], word: str, content: Any = None) -> None:
        """Send to these ranks, without waiting for them."""
        for rank in ranks:
            with suppress(self._mpi.Exception):
                self._sent.append(self._comm.isend((word, content), rank, TAG))

    def receive(self) -> tuple[str, Any, int] | None:
        """Return the next message as (word, content, sender), or None if none has arrived."""
        status = self._mpi.Status()
        for _ in range(2):
            try:
                if not self._comm.Iprobe(self._mpi.ANY_SOURCE, TAG, status):
                    return None
                word, content = self._comm.recv(source=status.source, tag=TAG)
                return word, content, status.source
            except self._mpi.Exception:  # a possible sender has died meanwhile
                with suppress(self._mpi.Exception):
                    self._comm.Ack_failed()
        return None

    def dead(self, ranks: Iterable[int]) -> set[int]:
        """Return those of these ranks that are known to be dead."""
        try:
            failed = self._comm.Get_failed()
        except (self._mpi.Exception, NotImplementedError):
            return set()
        dead = set(failed.Translate_ranks(None, self._comm.group)) if failed.size else set()
        return dead & set(ranks)


def stand_by(
    messages: ControlMessages,
    workers: set[int],
    build_digests: Callable[[], Mapping[str, str]],
    is_ready: Callable[[], bool],
    has_to_terminate: Callable[[], bool],
) -> tuple[str, Any]:
    """Wait for a message that ends the wait, and return its word and content; `ALL_LOST` if no worker is left.

    Args:
      workers: the ranks of the workers.
      build_digests: returns digests of what this process has built.
      is_ready: returns whether this process could join.
      has_to_terminate: returns whether this process received a termination signal; then the word is `TERMINATED`.
    """
    asked, alert_until, checked = None, 0.0, time.monotonic()
    while True:
        message = messages.receive()
        word, content, sender = message or ("", None, None)
        if word in (MEET, FAILED, DISMISSED):
            return word, content
        if word == ASK:
            asked = sender
        if asked is not None and is_ready():
            messages.send([asked], READY, dict(build_digests()))
            asked, alert_until = None, time.monotonic() + 5
        if message is not None:
            continue
        if has_to_terminate():
            return TERMINATED, None
        now = time.monotonic()
        time.sleep(ALERT_SECONDS if now < alert_until else IDLE_SECONDS)
        if now > checked + SECONDS_BETWEEN_CHECKS:
            checked = now
            if messages.dead(workers) == workers:
                return ALL_LOST, None
