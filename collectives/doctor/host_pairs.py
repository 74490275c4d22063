"""Bandwidth between each two hosts of a job, and the slow links that it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from collectives.worlds.transport.link_probe import MEGABYTE, timed_pairs

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
    gathered = comm.gather(timed_pairs(comm, leaders), 0) or []
    return [HostPair((leaders[a], leaders[b]), MEGABYTE / seconds) for of_rank in gathered for a, b, seconds in of_rank]


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
