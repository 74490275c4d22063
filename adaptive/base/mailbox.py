"""Mailboxes: a worker publishes vectors, and others read the latest ones at any time.

A mailbox is not a collective: neither publishing nor reading waits for another process. See `World.create_mailbox`.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol

import numpy as np

Vectors = Sequence[np.ndarray]  # one-dimensional, of the mailbox's sizes


class Mailbox(Protocol):
    """A mailbox for each worker, in which it publishes vectors with their round number."""

    def publish(self, worker: int, round: int, vectors: Vectors) -> None:
        """Replace the worker's published vectors by copies of these. Does not wait.

        Args:
          worker: one of this process's.
          round: number of the round, counted alike on all workers.
        """
        ...

    def look(self, worker: int, reader: int, round: int) -> Vectors | None:
        """Return the latest vectors of a worker, or `None` if it has none of this round or none can be read now.

        Does not wait. The vectors are consistent: all of one publication.

        Args:
          reader: the worker of this process that reads. The result is valid until its next call.
        """
        ...


class LocalMailbox:
    """The mailboxes of one process's workers. Published arrays are never modified, so readers need no lock."""

    def __init__(self) -> None:
        self._published: dict[int, tuple[int, Vectors]] = {}
        self._lock = Lock()

    def publish(self, worker: int, round: int, vectors: Vectors) -> None:
        """Publish vectors: the protocol of `Mailbox`."""
        copies = [np.array(vector) for vector in vectors]
        with self._lock:
            self._published[worker] = round, copies

    def look(self, worker: int, reader: int, round: int) -> Vectors | None:
        """Return a worker's latest vectors: the protocol of `Mailbox`."""
        of, vectors = self._published.get(worker, (round, None))
        return vectors if of == round else None
