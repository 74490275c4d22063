"""Scenarios with links between hosts that become slow, with two hosts in reserve."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from controllers.timing._batch_time import BatchTime

from ._cluster import Cluster, Trace, jitter, stages

HOSTS, RESERVE, ON_HOST = 4, 2, 2  # hosts at first, hosts in reserve, and workers of each
OVERHEAD = 0.1  # seconds of messages; a worker computes for some 0.16 s on 128 examples
JITTER = 0.05
HOST, WORKER = 1, 5  # a slow host, and a slow worker on another one
LINK = 1, 3  # a slow link between two hosts

Factor = Callable[[int], float]
"""`factor(step)`: by how much a link is slower in a step."""


def slow_links(between: tuple[int, ...], factor: Factor, hosts: int = HOSTS + RESERVE) -> Trace:
    """Return factors of links, for `Cluster.links`: of all links of one host, or of the link between two.

    Args:
      between: the number of the host, or of the two hosts.
      factor: of these links; the others have 1.
      hosts: number of hosts.
    """
    slow = np.zeros((hosts, hosts), bool)
    if len(between) == 1:
        slow[between[0], :] = slow[:, between[0]] = True
    else:
        slow[between], slow[between[::-1]] = True, True
    return lambda step, clock: np.where(slow, factor(step), 1.0)


def link_scenario(name: str, steps: int = 600, factor: float = 2.0) -> Cluster:
    """Return a cluster whose links become slow, with a reserve of two hosts.

    Args:
      name: one of `LINK_SCENARIOS`.
      steps: number of steps; events are at fractions of it.
      factor: by how much links become slower.

    Raises:
      ValueError: there is no such scenario.
    """
    if name not in LINK_SCENARIOS:
        raise ValueError(f"no scenario with links is called {name!r}; known are {', '.join(LINK_SCENARIOS)}.")
    start, end = steps // 4, steps // 2

    def for_good(step: int) -> float:
        return factor if step >= start else 1.0

    def for_a_while(step: int) -> float:
        return factor if start <= step < end else 1.0

    def degrading(step: int) -> float:
        return 1 + (factor - 1) * min(max(step - start, 0) / (end - start), 1.0)

    def flapping(step: int) -> float:
        return factor if step >= start and step // 30 % 2 else 1.0

    links: dict[str, Trace] = {
        "slow_link": slow_links(LINK, for_good),
        "link_for_a_while": slow_links(LINK, for_a_while),
        "link_degrades": slow_links(LINK, degrading),
        "link_flaps": slow_links(LINK, flapping),
        "slow_host": slow_links((HOST,), for_good),
        "link_and_worker": slow_links((HOST,), for_good),
    }
    n = (HOSTS + RESERVE) * ON_HOST
    slow = np.where(np.arange(n) == WORKER, factor, 1.0)
    return Cluster(
        BatchTime(np.full(n, 1e-3), np.full(n, 0.03)),
        stages({0: 1.0, start: slow}, n) if name == "link_and_worker" else None,
        jitter(JITTER),
        overhead=OVERHEAD,
        overhead_noise=JITTER,
        hosts=np.repeat(np.arange(HOSTS + RESERVE), ON_HOST).tolist(),
        links=links[name],
        first=HOSTS * ON_HOST,
        join_after=2,
    )


LINK_SCENARIOS = {
    "slow_link": "the link between two hosts, for good",
    "link_for_a_while": "the link between two hosts, for a quarter of the run",
    "link_degrades": "the link between two hosts, ever slower for a quarter of the run",
    "link_flaps": "the link between two hosts, 30 steps in 60",
    "slow_host": "all links of a host, for good",
    "link_and_worker": "all links of a host, and a worker on another one, for good",
}
