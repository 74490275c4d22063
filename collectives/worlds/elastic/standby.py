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

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

TAG = 7101
IDLE_SECONDS = 0.01  # between two polls; a poll takes some microseconds
ALERT_SECONDS = 0.0005  # when a rendezvous is near
SECONDS_BETWEEN_CHECKS = 0.1  # between two checks that a worker is alive

ASK, READY, MEET, FAILED, DISMISSED = "ready?", "ready", "meet", "failed", "dismissed"
WORKERS_LOST = (
    "all workers are lost, and with them the state of the run. The run starts anew from its last checkpoint if the "
    "driver calls program.restore(…, missing_ok=True) and the job is started by:  adaptive run --restarts 3 …"
)


class ControlMessages:
    """Point-to-point messages in one communicator, beside its collectives. Messages to dead processes are dropped."""

    def __init__(self, mpi: Any, comm: Any):
        self._mpi, self._comm, self._group = mpi, comm, comm.group
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
        if not failed.size:
            return set()
        dead = set(failed.Translate_ranks(None, self._group))
        failed.Free()  # Python does not, and this is called ten times a second
        return dead & set(ranks)
