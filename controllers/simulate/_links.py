"""Links between the hosts of a simulated cluster: the overhead of its steps, and probes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from adaptive.base.link_probe import LinkProbe

from ._cluster import Cluster

PROBE_NOISE = 0.5  # part of the noise of a step that a link has in a probe, which takes the least of several chunks


class Links:
    """The links of a cluster, with noise.

    Args:
      cluster: the cluster.
      seed: of the noise.
    """

    def __init__(self, cluster: Cluster, seed: int):
        self._cluster, self._draw = cluster, np.random.default_rng([seed, 2])

    def overhead(self, step: int, clock: float, members: Sequence[int]) -> float:
        """Return the seconds of a step in which no worker computes: those of the slowest link."""
        factors = self._cluster.factors(step, clock, members)
        noise = math.exp(self._cluster.overhead_noise * self._draw.standard_normal())
        known = factors[np.isfinite(factors)]
        return self._cluster.overhead_of(len(members)) * noise * float(known.max(initial=1.0))

    def probe(self, step: int, clock: float, members: Sequence[int]) -> LinkProbe:
        """Return a probe of the members' links after a step."""
        host_of, seconds = self._cluster.host_of, self._cluster.factors(step, clock, members)
        noise = np.triu(self._draw.standard_normal(seconds.shape), 1)
        seconds = seconds * np.exp(PROBE_NOISE * self._cluster.overhead_noise * (noise + noise.T))
        hosts = np.unique(host_of[list(members)])
        index = np.searchsorted(hosts, host_of)
        there = np.where(np.isin(np.arange(len(host_of)), members), index, -1)
        names = tuple(f"h{host}" for host in hosts.tolist())
        return LinkProbe(names, there, seconds[np.ix_(hosts, hosts)], step)
