"""Bandwidth between each two hosts of a job, and the slow links that it names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

CHUNK_BYTES = 1 << 20  # many times what a shaper lets through at once
CHUNKS = 4  # of a pair, of which the fastest counts: other work on a host only adds time
MOST_ROUNDS = 16  # all pairs of up to 17 hosts; of more hosts each is in 16 pairs
SLOW_LINK = 2.0  # the best link has more than this many times the bandwidth of one that is named


@dataclass(frozen=True)
class HostPair:
    """Bandwidth between two hosts.

    Attributes:
      ranks: a rank of each host.
      bandwidth: bytes per second, in each direction at once.
    """

    ranks: tuple[int, int]
    bandwidth: float


@dataclass(frozen=True)
class SlowLink:
    """A slow link.

    Attributes:
      hosts: a host all of whose links are slow, or two hosts with a slow link between them.
      bandwidth: bytes per second; of a host, the most with any other.
      usual: bytes per second of the others' links, to compare with.
    """

    hosts: tuple[str, ...]
    bandwidth: float
    usual: float


def host_pairs(comm: Any, leaders: Sequence[int]) -> list[HostPair]:
    """Measure the bandwidth between hosts. Called by all ranks. Returns the result on rank 0, and [] on other ranks.

    Args:
      comm: a communicator.
      leaders: a rank of each host.
    """
    found: list[HostPair] = []
    for pairs in rounds(len(leaders)):
        comm.Barrier()
        for pair in pairs:
            first, second = (leaders[i] for i in pair)
            if comm.rank in (first, second):
                seconds = _seconds_per_chunk(comm, second if comm.rank == first else first)
                found += [HostPair((first, second), CHUNK_BYTES / seconds)] if comm.rank == first else []
    return [pair for of_rank in comm.gather(found, 0) or [] for pair in of_rank]


def rounds(n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of n numbers: a number is in one pair of a round at most, and each pair is in one round."""
    seats = [*range(n), -1][: n + n % 2]  # with an odd number, one has no partner in each round
    for _ in range(min(len(seats) - 1, MOST_ROUNDS)):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _seconds_per_chunk(comm: Any, other: int) -> float:
    """Return the least seconds in which this rank and another one send each other a chunk."""
    sent, received = np.zeros(CHUNK_BYTES, np.uint8), np.zeros(CHUNK_BYTES, np.uint8)
    took: list[float] = []
    for _ in range(CHUNKS):
        start = time.perf_counter()
        comm.Sendrecv(sent, other, recvbuf=received, source=other)
        took.append(time.perf_counter() - start)
    return max(min(took), 1e-9)


def slow_links(names: Sequence[str], pairs: Sequence[HostPair]) -> list[SlowLink]:
    """Return the slow links: first hosts all of whose links are slow, then single links between other hosts.

    Fewer than three hosts have nothing to compare.

    Args:
      names: the host of each rank.
      pairs: as `host_pairs` returns them.
    """
    best: dict[str, float] = {}
    for pair in pairs:
        for rank in pair.ranks:
            best[names[rank]] = max(best.get(names[rank], 0.0), pair.bandwidth)
    if len(best) < 3:
        return []
    usual = median(best.values())
    found = [SlowLink((host,), rate, usual) for host, rate in best.items() if rate * SLOW_LINK < usual]
    named = {host for slow in found for host in slow.hosts}
    for pair in pairs:
        a, b = (names[rank] for rank in pair.ranks)
        least = min(best[a], best[b])
        if not named & {a, b} and pair.bandwidth * SLOW_LINK < least:
            found.append(SlowLink((a, b), pair.bandwidth, least))
    return found
