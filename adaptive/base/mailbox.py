"""Mailboxes: a worker publishes vectors, and others read the latest ones at any time.

A mailbox is not a collective: neither publishing nor reading waits for another process. See `World.create_mailbox`.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np

Vectors = Sequence[np.ndarray]  # one-dimensional, of the mailbox's sizes


class Mailbox:
    """The mailboxes of a process's workers, in which each publishes vectors with a round's number; a class for worlds
    of one process, which others override. Published arrays are never modified, so readers need no lock.
    """

    def __init__(self) -> None:
        self._published: dict[int, tuple[int, Vectors]] = {}
        self._lock = Lock()

    def publish(self, worker: int, round: int, vectors: Vectors) -> None:
        """Replace a worker's published vectors by copies of these. Does not wait.

        Args:
          worker: one of this process's.
          round: number of the round, counted alike on all workers.
        """
        copies = [np.array(vector) for vector in vectors]
        with self._lock:
            self._published[worker] = round, copies

    def look(self, worker: int, reader: int, round: int) -> Vectors | None:
        """Return the latest vectors of a worker, all of one publication, or `None` if it has none of this round or none
        can be read now. Does not wait.

        Args:
          reader: the worker of this process that reads. The result is valid until its next call.
        """
        of, vectors = self._published.get(worker, (round, None))
        return vectors if of == round else None
