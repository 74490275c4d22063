"""Sums that overlap with computation on this process, by polling MPI instead of waiting in it.

MPI waits by spinning, on a core that the computation needs. Between hosts, bytes are in the network for most of the
time, and the kernel moves them without MPI, as far as socket buffers have room. While the process computes, it keeps
some pieces under way, polls them, and sleeps. When the computation is done, it waits in MPI, which is faster.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from .parts import FlatPart, pieces

Computing = Callable[[], bool]  # returns whether this process still computes; called by the thread that sends

# Chosen between two hosts at 1 Gbit/s, with a rank on one core each: see benchmarks/overlap_between_hosts.py.
PIECE_BYTES = 4 << 20  # size of a piece; several are under way, so that the link is busy while one is summed
UNDER_WAY = 4
NAP = 5e-4  # seconds between two polls with two ranks: 60 kB at 1 Gbit/s, and sockets buffer some MB
LEAST_NAP = 1e-4  # with many ranks: a piece takes more rounds, and each round waits for a poll

_left: list[tuple[Any, ...]] = []  # requests under way after an error, kept because MPI may still write to their memory


def overlapped_sum(
    mpi: Any,
    comm: Any,
    part: FlatPart,
    op: Any,
    computing: Computing,
    *,
    survives: bool,
) -> Iterator[FlatPart]:
    """Reduce a part over all ranks, and yield its pieces as they arrive. Called by all ranks, computing or not.

    Args:
      mpi: the module `mpi4py.MPI`.
      comm: the communicator.
      part: the part.
      op: MPI's reduction.
      computing: returns whether this process still computes.
      survives: whether the others continue when a process is lost; if so, all requests are completed after an error.
    """
    nap = max(LEAST_NAP, 2 * NAP / comm.size)
    waiting = deque(pieces([part], PIECE_BYTES))
    under_way: deque[tuple[FlatPart, Any]] = deque()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < UNDER_WAY:
                piece = waiting.popleft()
                own = mpi.IN_PLACE if piece.source is None else piece.source
                under_way.append((piece, comm.Iallreduce(own, piece.target, op)))
            _wait(under_way[0][1], computing, nap)
            yield under_way.popleft()[0]
    except mpi.Exception:
        if not survives:
            raise
        with suppress(mpi.Exception):
            comm.Revoke()
        for _, request in under_way:  # the step is repeated in the same memory
            with suppress(mpi.Exception):
                request.Wait()
        under_way.clear()
        raise
    finally:
        if under_way:
            _left.append(tuple(under_way))


def _wait(request: Any, computing: Computing, nap: float) -> None:
    while not request.Test():
        if not computing():
            request.Wait()
            return
        time.sleep(nap)
