"""Hierarchical sums over several hosts, in which each host sends the sum of its ranks once.

    within    the ranks of a host add up, in shared memory, at its *leader*, the first of them
    between   leaders sum over hosts (`inter_host.py`)
    within    each leader broadcasts to its host

So of h hosts, n bytes of each rank, a host sends and receives 2 (h - 1) / h · n bytes, however many ranks it has and in
whatever order they are numbered. In a flat Allreduce of four ranks on two hosts Open MPI sends as much where the ranks
of a host are numbered consecutively, and twice as much where they alternate. Hosts may have different numbers of ranks.

It is a pipeline: while some pieces are between hosts, the next ones are added up within them, and the previous ones are
broadcast. MPI sends and receives while it waits within. The order of steps follows from sizes alone, never from what
has arrived, so all ranks call MPI in one order, and results do not depend on timing.

Each element is summed at one place of each host, so all of its ranks have the same bits; and at one place of all hosts.

Without a pipeline, so that the link waits while hosts add up, ResNet-50's gradients took two hosts at 1 Gbit/s,
two ranks each, 1.6 s where they now take 0.91, of which 0.82 are the link's. Leaders that sum by Iallreduce took 1.06.
As many slices as a host has ranks, each summed between hosts by another of them (Reduce_scatter, Allreduce and
Allgather), took 1.13 s without a pipeline, where leaders took 0.98.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from collectives.worlds.transport.repair import all_agree

from .inter_host import InterHostSum
from .parts import FlatPart, pieces

# Two hosts at 1 Gbit/s, two ranks each, on a busy machine of two cores, ResNet-50's gradients, the least of six times
# where ranks follow one another and where they alternate: in pieces of 256 kB with 2 MB before each of the two steps
# 0.95 and 1.08 s; of 512 kB with 1 MB 1.30 and 1.00, with 2 MB 0.90 and 0.91, with 4 MB 0.90 and 0.89; of 1 MB with
# 2 MB 1.04 and 1.02, with 4 MB 0.98 and 0.98. Medians are shorter with 4 MB than with 2: leaders are late now and then.
PIECE_BYTES = 512 << 10
UNDER_WAY_BYTES = 4 << 20

_LEFT: list[Any] = []  # requests that were under way when a process was lost: MPI may still use their memory


class HierarchicalSum:
    """A hierarchical sum over the ranks of a communicator. Made by all of them; communicates.

    Args:
      host: the number of this process's host.
      survives: whether the others continue when a process is lost: then no process is left waiting in it.

    Raises:
      Exception: MPI's. If one process raises it, all do, and `comm` is revoked.
    """

    def __init__(self, mpi: Any, comm: Any, host: int, *, survives: bool):
        self._mpi = mpi
        error: Exception | None = None
        try:
            within = comm.Split(host, comm.rank)
            within.Set_errhandler(mpi.ERRORS_RETURN)
            self._leads = within.rank == 0
            between = comm.Split(0 if self._leads else mpi.UNDEFINED, comm.rank)
            if self._leads:
                between.Set_errhandler(mpi.ERRORS_RETURN)
        except mpi.Exception as failed:
            if not survives:
                raise
            error = failed
            with suppress(mpi.Exception):
                comm.Revoke()  # others may still be making theirs
        # A process that has them would wait in them for one that has not, without an error: so all have them, or none.
        if survives and not all_agree(mpi, comm, error is None):
            raise error or mpi.Exception(mpi.ERR_PROC_FAILED)
        self._within, self._between = within, between
        self._revoked = False
        self._to_add, self._added = _Queue(), _Queue()
        self._outgoing: list[Any] = []  # of leaders, in the message so far

    def sum(self, parts: Iterable[FlatPart], done: Callable[[FlatPart], None]) -> None:
        """Sum parts over all ranks, and call `done` with each piece, on all ranks in the same order. `parts` are taken
        one by one, when the previous ones are under way.
        """
        for piece in pieces(parts, PIECE_BYTES):
            self._add_up(piece)
            self._proceed(UNDER_WAY_BYTES, done)
        self._proceed(0, done)
        if self._leads:
            self._between.Barrier()  # all leaders have finished, so what was sent has arrived
            self._mpi.Request.Waitall(self._outgoing)
            self._outgoing = []

    def reduce(self, values: np.ndarray, between: Callable[[Any, np.ndarray], None]) -> None:
        """Reduce over hosts by another function: sum within each host, call `between` on the leaders, broadcast its
        result.

        Args:
          values: flat; reduced in place.
          between: given the leaders' communicator, and the sum over a host, which it replaces.
        """
        if self._leads:
            self._within.Reduce(self._mpi.IN_PLACE, values)
            between(self._between, values)
        else:
            self._within.Reduce(values, None)
        self._within.Bcast(values)

    def _add_up(self, piece: FlatPart) -> None:
        """Sum a piece within the host, and start its sum between hosts."""
        if self._leads:
            self._within.Reduce(self._mpi.IN_PLACE if piece.source is None else piece.source, piece.target)
            between = InterHostSum(self._between, piece.target)
            self._to_add.append(piece, between)  # before anything is under way, so that it is kept if that fails
            between.begin()
        else:
            self._within.Reduce(piece.target if piece.source is None else piece.source, None)
            self._to_add.append(piece, None)

    def _proceed(self, left: int, done: Callable[[FlatPart], None]) -> None:
        """Finish the oldest steps, until no more than `left` bytes wait for either of the two."""
        while self._to_add.nbytes > left:
            piece, between = self._to_add.first
            if between is not None:
                between.add()
            self._added.append(*self._to_add.popleft())
        while self._added.nbytes > left:
            piece, between = self._added.first
            if between is not None:
                between.finish()
                self._outgoing += between.outgoing
            self._within.Bcast(piece.target)
            self._added.popleft()
            done(piece)

    def revoke(self) -> None:
        """Release the processes that wait in it for a lost process."""
        self._revoked = True
        for comm in self._comms():
            with suppress(self._mpi.Exception):
                comm.Revoke()
        _LEFT.append((self._to_add, self._added, self._outgoing))
        self._to_add, self._added, self._outgoing = _Queue(), _Queue(), []

    def free(self) -> None:
        """Free its communicators; collective."""
        if not self._revoked:
            for comm in self._comms():
                with suppress(self._mpi.Exception):
                    comm.Free()

    def _comms(self) -> list[Any]:
        return [self._within, *([self._between] if self._leads else [])]


class _Queue:
    """Pieces that wait for the same step, the oldest first, with what leaders have under way for them.

    Attributes:
      nbytes: of all of them.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[FlatPart, InterHostSum | None]] = deque()
        self.nbytes = 0

    @property
    def first(self) -> tuple[FlatPart, InterHostSum | None]:
        """The oldest piece. It stays until its step is finished, so that its requests are kept if that fails."""
        return self._pieces[0]

    def append(self, piece: FlatPart, between: InterHostSum | None) -> None:
        """Append a piece."""
        self._pieces.append((piece, between))
        self.nbytes += piece.target.nbytes

    def popleft(self) -> tuple[FlatPart, InterHostSum | None]:
        """Remove and return the oldest piece."""
        piece, between = self._pieces.popleft()
        self.nbytes -= piece.target.nbytes
        return piece, between
