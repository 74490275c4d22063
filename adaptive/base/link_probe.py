"""Probes of the links between hosts: what a probe returns, and the worlds that can make one."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np


class LinkProbe(NamedTuple):
    """Times between each two hosts of the members, measured between two steps. Replicated.

    Attributes:
      hosts: their names; empty if the world cannot probe.
      host_of: the index of each worker slot's host; shape=(capacity,), -1 for slots that are no member's.
      seconds: to send a megabyte in both directions at once; shape=(hosts, hosts), symmetric, NaN where not measured.
      step: the step after which it was made.
    """

    hosts: tuple[str, ...]
    host_of: np.ndarray
    seconds: np.ndarray
    step: int = 0


@runtime_checkable
class ProbesLinks(Protocol):
    """The method of a world that measures the links between its hosts, besides those of `World`."""

    def probe_links(self, about: str = "") -> LinkProbe:
        """Measure the links between the members' hosts. Collective; bounded bytes and time per pair of hosts.

        Args:
          about: see `World`.
        """
        ...


def no_links(capacity: int) -> LinkProbe:
    """Return the probe of a world that cannot probe: no hosts."""
    return LinkProbe((), np.full(capacity, -1), np.zeros((0, 0)))
