"""Mailboxes: a worker publishes vectors, and others read the latest ones at any time.

A mailbox is not a collective: neither publishing nor reading waits for another process. Worlds need not offer
mailboxes; those that do have the methods of `OffersMailboxes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol, runtime_checkable

import numpy as np

Vectors = Sequence[np.ndarray]  # one-dimensional, of the mailbox's sizes


@runtime_checkable
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


@runtime_checkable
class OffersMailboxes(Protocol):
    """The methods of a world with mailboxes, besides those of `World`."""

    def why_no_mailbox(self) -> str:
        """Return why this world has no mailboxes; "" if it has. Replicated."""
        ...

    def create_mailbox(self, nbytes: Sequence[int], about: str, instead_of: Mailbox | None = None) -> Mailbox:
        """Create a mailbox for the current members. Collective.

        Args:
          nbytes: size of each vector that a worker publishes.
          about: see `World`.
          instead_of: an earlier mailbox that this one replaces; it is closed.
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


class LocalMailboxes:
    """Mixin for worlds of one process, which have mailboxes."""

    def why_no_mailbox(self) -> str:
        """Return ""."""
        return ""

    def create_mailbox(self, nbytes: Sequence[int], about: str, instead_of: Mailbox | None = None) -> Mailbox:
        """Create a mailbox: the protocol of `OffersMailboxes`."""
        return LocalMailbox()
