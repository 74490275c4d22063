"""The plans of one driver."""

from __future__ import annotations

from typing import Protocol

from adaptive.graph.plan import Plan


class Plans(Protocol):
    """The plans of one driver, by size; see `adaptive.graph.planner.Planner`."""

    @property
    def reference(self) -> Plan:
        """The plan for the first size; others differ from it in their size only."""
        ...

    def __call__(self, examples: int) -> Plan:
        """Return the plan for microbatches of `examples` examples."""
        ...

    def for_capacity(self, capacity: int) -> Plans:
        """Return the plans of the same driver for another number of worker slots."""
        ...
