"""Sums that travel while this process computes: MPI is looked at now and then, and not waited in.

MPI waits by spinning, on the core that the computation needs. Between hosts bytes lie in the network for most of the
time, and the kernel moves them by itself, as far as sockets have room. So whoever computes meanwhile has some pieces
under way, looks at them, and sleeps. When nothing is computed any more it waits in MPI, which is faster.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from .parts import FlatPart, pieces

Computing = Callable[[], bool]  # whether this process computes something beside; asked from the thread that sends

# Chosen between two hosts at 1 Gbit/s, with a rank on one core each: see benchmarks/overlap_between_hosts.py.
PIECE_BYTES = 4 << 20  # one of several that are under way, so that the link is busy while another one is added up
UNDER_WAY = 4
NAP = 5e-4  # seconds between two looks, of two ranks: 1 Gbit/s brings 60 kB in it, and sockets hold some MB
LEAST_NAP = 1e-4  # of many: a piece goes in rounds, the more the more ranks there are, and each round waits for a look

_left: list[tuple[Any, ...]] = []  # what an error has left under way, with its memory: MPI may still write there


def overlapped_sum(
    mpi: Any,
    comm: Any,
    part: FlatPart,
    op: Any,
    computing: Computing,
    *,
    survives: bool,
) -> Iterator[FlatPart]:
    """Reduce a part over all ranks: its pieces, as they have come. All ranks call it; each computes for as long as it
    likes.

    Args:
      survives: whether others go on where a process is lost: then nothing is under way any more behind the error.
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
        for _, request in under_way:  # memory is used again for what is taken again
            with suppress(mpi.Exception):
                request.Wait()
        under_way.clear()
        raise
    finally:
        if under_way:
            _left.append(tuple(under_way))


def _wait(request: Any, computing: Computing, nap: float) -> None:
    """Until it is completed."""
    while not request.Test():
        if not computing():
            request.Wait()
            return
        time.sleep(nap)
