"""The microbatch segments of a driver, ready to be compiled, by number of examples."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from adaptive.graph.plan import Plan, Segment

from .message import lay_out_all
from .segment import Address, Feed, SegmentFunction, segment_function


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


class MicrobatchSegment(NamedTuple):
    """A segment that is ready to be compiled.

    Attributes:
      call: the segment as a function.
      consts: the arrays of the driver's closure that it reads, by address.
    """

    call: SegmentFunction
    consts: dict[Address, Any]


class MicrobatchSegments:
    """The segments of a driver's kernels: `segments(examples)` returns those for so many examples, by level.

    Args:
      status: the number of elements of the status.
    """

    def __init__(self, plans: Plans, feed: Feed, status: int):
        self._plans, self._feed, self._status = plans, feed, status

    def __call__(self, examples: int) -> dict[int, MicrobatchSegment]:
        plan = self._plans(examples)
        layouts = lay_out_all(plan.messages, capacity=plan.graph.capacity, status=self._status)
        return {
            level: MicrobatchSegment(segment_function(plan, segment, self._feed, layouts), consts_of(plan, segment))
            for level, segment in plan.microbatches.items()
        }


def consts_of(plan: Plan, segment: Segment) -> dict[Address, Any]:
    """Return the arrays of the driver's closure that a segment reads, by address."""
    values = list(plan.graph.consts.values())
    return {("const", i, 0): values[i] for i in segment.reads("const")}
