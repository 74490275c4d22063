"""Algorithms for large sums between several hosts, and the choice between them for each message.

Small sums and extremes take the flat algorithm: their cost is latency, which grows with the number of steps of an
algorithm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from adaptive.base.reductions import Sliced
from collectives.worlds.transport.operations import ReduceMessage
from collectives.worlds.transport.process_group import ProcessGroup

from .autotune import Autotuner, AutotunerCache, TuningKey
from .hierarchical import HierarchicalSum
from .parts import FlatPart, pieces

LARGE_BYTES = 64 << 10  # the least size of a part that has several algorithms
FLAT_PIECE_BYTES = 1 << 30  # each piece costs the network's latency; the limit of 32-bit counts
NAMES = "flat", "hierarchical"
HIERARCHICAL = 1


class FlatSum:
    """MPI's own Allreduce over all ranks."""

    def __init__(self, mpi: Any, comm: Any):
        self._mpi, self._comm = mpi, comm

    def sum(self, parts: Iterable[FlatPart]) -> None:
        """Sum parts over all ranks."""
        for piece in pieces(parts, FLAT_PIECE_BYTES):
            self._comm.Allreduce(self._mpi.IN_PLACE if piece.source is None else piece.source, piece.target)


class Algorithms:
    """The algorithms of one process group. One message at a time.

    Attributes:
      hierarchical: whether the latest message takes the hierarchical algorithm. Replicated.
    """

    def __init__(self, mpi: Any, group: ProcessGroup, *, survives: bool):
        self._mpi, self._comm, self._survives = mpi, group.comm, survives
        self._host = group.everyone[group.comm.rank].host
        self._flat = FlatSum(mpi, group.comm)
        self._by_host: HierarchicalSum | None = None  # made for the first message that takes it
        self._tuners = AutotunerCache(NAMES)
        self._fixed: set[Hashable] = set()  # channels of deterministic programs, which are not tuned
        self._seconds = 0.0  # time of the message in sums that have several algorithms
        self.hierarchical = False

    def begin_message(self, message: ReduceMessage, key: TuningKey, *, fixed: bool) -> None:
        """Choose the algorithm of a message. Its large sums are then passed to `sum`.

        Args:
          message: the operation of the message.
          key: identifies the messages that share measurements.
          fixed: take the hierarchical algorithm, without measuring.
        """
        tuner = None if fixed else self._tuners.get(key)
        self.hierarchical = tuner is None or tuner.choice == HIERARCHICAL
        # If a host's leader dies during the sum, some ranks may have the whole result, and others nothing.
        message.wrap_reduce(partial(self._carry_out, message.about, key, tuner), agreed=self.hierarchical)

    def _carry_out(
        self, about: str, key: TuningKey, tuner: Autotuner | None, reduce: Callable[[], np.ndarray]
    ) -> np.ndarray:
        # Replicated state changes only here, where all processes are known to be in the same message.
        if self.hierarchical and self._by_host is None:
            self._by_host = HierarchicalSum(self._mpi, self._comm, self._host, survives=self._survives)
        self._seconds = 0.0
        result = reduce()
        if tuner is None:
            self._fixed.add(key[0])
            return result
        self._tuners.keep(key, tuner)
        tuner.record(self._seconds)
        if (times := tuner.due) is not None:
            self._comm.Allreduce(self._mpi.IN_PLACE, times, self._mpi.MAX)
            tuner.compare(times, about)
        return result

    def sum(self, parts: Iterable[FlatPart]) -> None:
        """Sum the large parts of a message over all ranks. `parts` is iterated lazily."""
        began = perf_counter()
        algorithm = self._by_host if self.hierarchical and self._by_host is not None else self._flat
        algorithm.sum(parts)
        self._seconds += perf_counter() - began

    def reduce_timed(self, reduce: Callable[[HierarchicalSum | None], None]) -> None:
        """Call `reduce` with the hierarchical sum, or None for the flat one, and add its time to the message's."""
        began = perf_counter()
        reduce(self._by_host if self.hierarchical else None)
        self._seconds += perf_counter() - began

    def describe(self, channel: Hashable) -> str:
        """Describe which algorithm a channel's messages take, and why; "" if they had no large sum. Replicated."""
        if channel in self._fixed:
            return f"{NAMES[HIERARCHICAL]}, not measured: in a deterministic program"
        return self._tuners.describe(channel)

    def revoke(self) -> None:
        """Release processes that wait for a lost process in a hierarchical sum."""
        if self._by_host is not None:
            self._by_host.revoke()

    def free(self) -> None:
        """Free the communicators; collective."""
        if self._by_host is not None:
            self._by_host.free()
        self._by_host = None


def multi_host_algorithms(mpi: Any, group: ProcessGroup, *, survives: bool) -> Algorithms | None:
    """Return the algorithms for a group; None if all ranks are on one host, or each on its own, where one is best."""
    ranks = Counter(process.host for process in group.everyone)
    return Algorithms(mpi, group, survives=survives) if 1 < len(ranks) < len(group.everyone) else None


def is_large(op: Any, nbytes: int) -> bool:
    """Return whether a part is a sum of many bytes."""
    return bool(nbytes >= LARGE_BYTES and op == "sum")


def has_algorithms(op: Any, nbytes: int) -> bool:
    """Return whether there are several algorithms between hosts for such a part."""
    return is_large(op, nbytes) or (nbytes >= LARGE_BYTES and isinstance(op, Sliced) and op.is_sum)
