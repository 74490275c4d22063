"""A probe of the links between hosts: pairs of hosts exchange data at the same time.

An exchange over all processes is as slow as the slowest link, and does not say which one that is. Pairs do: a host
whose link is slow is slow with every other host, and a slow path between two hosts only between these.

The first process of each host takes part. A pair exchanges chunks until it has measured enough or for long enough, so
a probe of many hosts takes milliseconds on fast links, and some tenths of a second on very slow ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np

from adaptive.base.link_probe import LinkProbe

from .operations import Operation
from .process_group import ProcessGroup

CHUNK_BYTES = 1 << 20  # many times what a shaper lets through at once
LEAST_CHUNKS, MOST_CHUNKS = 2, 8  # of a pair, of which the fastest counts: other work on a host only adds time
PAIR_SECONDS = 0.03  # a pair ends after this time, if it has the least chunks
PROBE_SECONDS = 1.0  # no round begins after this time; links that are left out count as not measured
MOST_ROUNDS = 16  # all pairs of up to 17 hosts; of more hosts each is in 16 pairs
MEGABYTE = 1e6

_PROBE = crc32(b"probe of links")


def rounds(n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of n numbers: a number is in one pair of a round at most, and each pair is in one round."""
    seats = [*range(n), -1][: n + n % 2]  # with an odd number, one has no partner in each round
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def timed_pairs(comm: Any, leaders: Sequence[int], seconds: float = math.inf) -> list[tuple[int, int, float]]:
    """Measure the links between hosts. Called by all ranks of a communicator.

    Args:
      comm: the communicator.
      leaders: a rank of each host.
      seconds: no round begins after this time.

    Returns:
      The pairs of hosts whose first host has this rank as its leader, by index in `leaders`, with the seconds in which
      they send each other a megabyte.
    """
    found: list[tuple[int, int, float]] = []
    began = time.perf_counter()
    for number, pairs in enumerate(rounds(len(leaders)) if len(leaders) > 1 else ()):
        if max(comm.allgather(time.perf_counter() - began)) > seconds or number == MOST_ROUNDS:
            break
        for a, b in pairs:
            first, second = leaders[a], leaders[b]
            if comm.rank in (first, second):
                took = _timed_pair(comm, second if comm.rank == first else first)
                found += [(a, b, took)] if comm.rank == first else []
    return found


def _timed_pair(comm: Any, other: int) -> float:
    """Return the seconds in which this rank and another one send each other a megabyte: the least of some chunks."""
    sent, received = np.zeros(CHUNK_BYTES, np.uint8), np.zeros(CHUNK_BYTES, np.uint8)
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < MOST_CHUNKS and not (sent[0] or received[0]):
        # Both ranks read both flags, so they stop after the same chunk.
        start = time.perf_counter()
        sent[0] = len(took) + 1 >= LEAST_CHUNKS and start - began > PAIR_SECONDS
        comm.Sendrecv(sent, other, recvbuf=received, source=other)
        took.append(time.perf_counter() - start)
    return max(min(took), 1e-9) * MEGABYTE / CHUNK_BYTES


class ProbeLinks(Operation):
    """The operation that measures the links between the hosts of a group. The probe is its `result`.

    Args:
      about: see `World`.
      group: returns the processes; called when the operation is carried out.
      capacity: number of worker slots.
    """

    agreed = True  # as for `GatherBytes`

    def __init__(self, about: str, group: Callable[[], ProcessGroup], capacity: int):
        super().__init__(about, "", _PROBE, "a probe of links")
        self._group, self._capacity = group, capacity
        self.result: LinkProbe | None = None

    def carry_out(self, comm: Any) -> None:
        everyone = self._group().everyone
        leaders: dict[int, int] = {}
        for rank, process in enumerate(everyone):
            leaders.setdefault(process.host, rank)
        index = {host: i for i, host in enumerate(leaders)}
        host_of = np.full(self._capacity, -1)
        for process in everyone:
            host_of[process.worker_slots.start : process.worker_slots.stop] = index[process.host]
        seconds = np.full((len(leaders), len(leaders)), np.nan)
        for pairs in comm.allgather(timed_pairs(comm, list(leaders.values()), PROBE_SECONDS)):
            for a, b, took in pairs:
                seconds[a, b] = seconds[b, a] = took
        names = tuple(everyone[rank].node for rank in leaders.values())
        self.result = LinkProbe(names, host_of, seconds)
