"""The ways by which large sums go between several hosts, and which message takes which.

What is small goes flat, and so do extremes: between hosts they cost a message's latency, which grows with the steps
that a way has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from adaptive.extend import LookAtPiece, Sliced
from collectives.worlds.transport.operations import ReduceMessage
from collectives.worlds.transport.process_group import ProcessGroup

from .autotune import Autotuner, AutotunerCache, TuningKey
from .hierarchical import HierarchicalSum
from .parts import FlatPart, pieces

LARGE_BYTES = 64 << 10  # of a part that can go by hosts
FLAT_PIECE_BYTES = 1 << 30  # every piece would pay the network's latency; no more than 32-bit counts hold
NAMES = "flat", "by hosts"
BY_HOSTS = 1


class FlatSum:
    """MPI's own Allreduce over all ranks."""

    def __init__(self, mpi: Any, comm: Any):
        self._mpi, self._comm = mpi, comm

    def sum(self, parts: Iterable[FlatPart], done: Callable[[FlatPart], None]) -> None:
        """Sum parts over all ranks; each piece is `done`."""
        for piece in pieces(parts, FLAT_PIECE_BYTES):
            self._comm.Allreduce(self._mpi.IN_PLACE if piece.source is None else piece.source, piece.target)
            done(piece)


class Algorithms:
    """Of processes that are together. One message at a time.

    Attributes:
      by_hosts: whether the message that was begun last goes by hosts. Replicated.
    """

    def __init__(self, mpi: Any, together: ProcessGroup, *, survives: bool):
        self._mpi, self._comm, self._survives = mpi, together.comm, survives
        self._host = together.everyone[together.comm.rank].host
        self._flat = FlatSum(mpi, together.comm)
        self._through: HierarchicalSum | None = None  # made for the first message that goes by hosts
        self._choices = AutotunerCache(NAMES)
        self._fixed: set[Hashable] = set()  # channels whose messages go by hosts, whatever is faster
        self._seconds = 0.0  # that the message has spent in what has several ways
        self.by_hosts = False

    def begin(self, message: ReduceMessage, key: TuningKey, *, fixed: bool) -> None:
        """Decide which way a message with large sums goes, which come to `sum`.

        Args:
          fixed: it goes by hosts, whatever is faster.
        """
        choice = None if fixed else self._choices.of(key)
        self.by_hosts = choice is None or choice.way == BY_HOSTS
        # Where a host's leader dies in the midst of it, some ranks may have all of it, and others nothing.
        message.surround(partial(self._carry_out, message.about, key, choice), agreed=self.by_hosts)

    def _carry_out(
        self, about: str, key: TuningKey, choice: Autotuner | None, reduce: Callable[[], np.ndarray]
    ) -> np.ndarray:
        # Only here all are known to be about the same message, and what all know alike may change.
        if self.by_hosts and self._through is None:
            self._through = HierarchicalSum(self._mpi, self._comm, self._host, survives=self._survives)
        self._seconds = 0.0
        result = reduce()
        if choice is None:
            self._fixed.add(key[0])
            return result
        self._choices.keep(key, choice)
        choice.took(self._seconds)
        if (times := choice.due) is not None:
            self._comm.Allreduce(self._mpi.IN_PLACE, times, self._mpi.MAX)
            choice.compare(times, about)
        return result

    def sum(self, parts: Iterable[FlatPart], look: LookAtPiece | None = None) -> None:
        """Sum the large parts of a message over all ranks, and have each piece of the sums looked at. `parts` are asked
        for one by one, and it is known of none before all are here that it has arrived.
        """
        began = perf_counter()
        way = self._through if self.by_hosts and self._through is not None else self._flat
        way.sum(parts, lambda piece: None if look is None else look(piece.number, piece.start, piece.target))
        self._seconds += perf_counter() - began

    def reduce(self, reduce: Callable[[HierarchicalSum | None], None]) -> None:
        """Reduce what else has several ways; `reduce` is given the hosts, if it goes by them."""
        began = perf_counter()
        reduce(self._through if self.by_hosts else None)
        self._seconds += perf_counter() - began

    def in_words(self, channel: Hashable) -> str:
        """Which way a channel's messages go, and why; nothing where none that is large was sent. Replicated."""
        if channel in self._fixed:
            return f"{NAMES[BY_HOSTS]}, whatever is faster: in a deterministic program"
        return self._choices.in_words(channel)

    def revoke(self) -> None:
        """Nobody waits any more for somebody who does not come."""
        if self._through is not None:
            self._through.revoke()

    def free(self) -> None:
        """Not used any more; by all."""
        if self._through is not None:
            self._through.free()
        self._through = None


def multi_host_algorithms(mpi: Any, together: ProcessGroup, *, survives: bool) -> Algorithms | None:
    """The ways there are, or `None`: on one host, and on several of which each has one rank, there is only one."""
    ranks = Counter(process.host for process in together.everyone)
    return Algorithms(mpi, together, survives=survives) if 1 < len(ranks) < len(together.everyone) else None


def is_large(op: Any, nbytes: int) -> bool:
    """Whether a part is a sum of many bytes."""
    return bool(nbytes >= LARGE_BYTES and op == "sum")


def has_ways(op: Any, nbytes: int) -> bool:
    """Whether there are several ways between hosts for such a part."""
    return is_large(op, nbytes) or (nbytes >= LARGE_BYTES and isinstance(op, Sliced) and op.is_sum)
