"""Sums that overlap with computation on this process: MPI is polled now and then, and not waited in.

MPI waits by spinning, on the core that the computation needs. Between hosts, bytes are in the network for most of the
time, and the kernel moves them by itself, as far as socket buffers have room. So a process that computes meanwhile has
some pieces under way, polls them, and sleeps. When it computes no longer it waits in MPI, which is faster.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from .parts import FlatPart, pieces

Computing = Callable[[], bool]  # whether this process computes something meanwhile; called by the thread that sends

# Chosen between two hosts at 1 Gbit/s, with a rank on one core each: see benchmarks/overlap_between_hosts.py.
PIECE_BYTES = 4 << 20  # of one of the pieces under way: several, so that the link is busy while one is added up
UNDER_WAY = 4
NAP = 5e-4  # seconds between two polls, of two ranks: 1 Gbit/s brings 60 kB meanwhile, and sockets hold some MB
LEAST_NAP = 1e-4  # of many ranks: a piece takes more rounds the more ranks there are, and each round waits for a poll

_left: list[tuple[Any, ...]] = []  # requests that an error has left under way: MPI may still write into their memory


def overlapped_sum(
    mpi: Any,
    comm: Any,
    part: FlatPart,
    op: Any,
    computing: Computing,
    *,
    survives: bool,
) -> Iterator[FlatPart]:
    """Reduce a part over all ranks, and yield its pieces as they arrive. Called by all ranks, whatever they compute.

    Args:
      survives: whether the others continue when a process is lost: then nothing is left under way after the error.
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
