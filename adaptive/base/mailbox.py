"""Mailboxes: a worker publishes vectors, and others read the latest ones at any time.

A mailbox is not a collective: neither publishing nor reading waits for another process. Worlds need not offer
mailboxes; those that do have the methods of `OffersMailboxes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@runtime_checkable
class CopyMailbox(Mailbox, Protocol):
    """A mailbox whose publications can still be read after their worker's loss. Keeps a worker's last two."""

    @property
    def hosts(self) -> dict[int, int]:
        """The host of each worker, as a number. Replicated."""
        ...

    def is_mapped(self, worker: int) -> bool:
        """Return whether this process can read a worker's publications from memory, also after its loss. Local."""
        ...

    def rounds(self, worker: int) -> list[int]:
        """Return the rounds of a worker's complete publications, newest first. Only if `is_mapped`."""
        ...

    def copy_of(self, worker: int, round: int) -> Vectors | None:
        """Return a copy of a worker's publication of a round; `None` if there is no complete one. Only if `is_mapped`.

        The caller owns the vectors.
        """
        ...


class HoldsCopies(Protocol):
    """The copies that a process holds, as its world sees them."""

    def newest(self) -> int:
        """Return the number of the newest complete copy that this process can continue from; -1 if there is none.
        Local.
        """
        ...

    def has_place(self) -> bool:
        """Return whether this process has a place for its copies: a spawned one has none at first. Local."""
        ...

    def create(self, make: Callable[[Sequence[int]], CopyMailbox]) -> None:
        """Create mailboxes with a place for each process of the job. Called on all of them, if one has none.

        Args:
          make: creates a mailbox for vectors of these sizes in bytes. Collective.
        """
        ...


@runtime_checkable
class OffersCopies(Protocol):
    """The methods of a world whose processes keep copies of each other's state, besides those of `World`."""

    @property
    def known_before_take_over(self) -> int | None:
        """On the process in reserve whose copy the run continues from: the number of losses it knew before all members
        were lost. `None` on other processes, and once its state was transferred. Local.
        """
        ...

    def why_no_copies(self) -> str:
        """Return why this world keeps no copies; "" if it does. Replicated."""
        ...

    def create_copies(self, nbytes: Sequence[int], about: str) -> CopyMailbox:
        """Create a mailbox for copies; before a run, with places for all processes, in reserve too. Collective.

        A worker's memory is allocated when it first publishes, which raises OSError if memory is short.

        Args:
          nbytes, about: see `OffersMailboxes.create_mailbox`.
        """
        ...

    def hold_copies(self, holder: HoldsCopies | None) -> None:
        """Let the processes in reserve continue the run when all members are lost. Called on every process.

        Args:
          holder: the copies of this process. The process with the newest one continues. `None`: the job ends with an
            error.
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
