"""Where workers publish what others look at whenever they like: the `Board` of a world.

An exchange is a meeting: all come. A board is none. Who publishes waits for nobody, and who looks takes what is there.
Worlds need not offer boards; those that do have the methods of `OffersBoards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Protocol, runtime_checkable

import numpy as np

Vectors = Sequence[np.ndarray]  # one-dimensional, of the board's sizes


@runtime_checkable
class Board(Protocol):
    """A place for each worker, at which it publishes a tuple of vectors, with the round that they are of."""

    def publish(self, worker: int, round: int, vectors: Vectors) -> None:
        """Show these in the worker's place from now on, instead of what was there. Copies; waits for nobody.

        Args:
          worker: one of this process's.
          round: counted alike on all workers.
        """
        ...

    def look(self, worker: int, reader: int, round: int) -> Vectors | None:
        """What a worker has published last, whole, as vectors of as many bytes; `None` if it has published nothing in
        this round, or what it has cannot be had now. Waits for nobody.

        Args:
          reader: for which worker of this process. What is returned stays valid until it looks again.
        """
        ...


@runtime_checkable
class OffersBoards(Protocol):
    """What a world with boards has beside the methods of `World`."""

    def why_no_board(self) -> str:
        """Why it has none, as it was started: "" where it has. Replicated."""
        ...

    def board(self, nbytes: Sequence[int], about: str, instead_of: Board | None = None) -> Board:
        """Make one, for those who are members now. All processes that are together do so at the same point.

        Args:
          nbytes: of the vectors that each worker publishes.
          about: see `World`.
          instead_of: one that is not used any more.
        """
        ...


class LocalBoard:
    """The board of workers of one process. What is published is never written again, so readers need no lock."""

    def __init__(self) -> None:
        self._published: dict[int, tuple[int, Vectors]] = {}
        self._lock = Lock()

    def publish(self, worker: int, round: int, vectors: Vectors) -> None:
        """Show these: the protocol of `Board`."""
        copies = [np.array(vector) for vector in vectors]
        with self._lock:
            self._published[worker] = round, copies

    def look(self, worker: int, reader: int, round: int) -> Vectors | None:
        """What a worker has published last in this round: the protocol of `Board`."""
        of, vectors = self._published.get(worker, (round, None))
        return vectors if of == round else None


class LocalBoards:
    """For worlds of one process: they have boards."""

    def why_no_board(self) -> str:
        """Nothing speaks against it."""
        return ""

    def board(self, nbytes: Sequence[int], about: str, instead_of: Board | None = None) -> Board:
        """Make one: the protocol of `OffersBoards`."""
        return LocalBoard()
