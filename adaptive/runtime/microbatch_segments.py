"""The microbatch segments of a driver, ready to be compiled, by number of examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from adaptive.graph.plan import Plan, Segment

from .message import Layout, lay_out_all
from .segment import Feed, segment_function


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
    """A segment that is ready to be compiled."""

    function: Callable[[dict[str, Any]], dict[str, Any]]
    shapes: dict[str, Any]  # of its inputs
    consts: tuple[Any, ...]  # the arrays of the driver's closure that the segment reads


class MicrobatchSegments:
    """The segments of a driver's kernels: `calls(examples)` returns those for so many examples, by level.

    Args:
      layouts: the layouts of the messages, the same for all sizes.
    """

    def __init__(self, plans: Plans, feed: Feed, layouts: Sequence[Layout]):
        self._plans, self._feed, self._layouts = plans, feed, layouts

    def __call__(self, examples: int) -> dict[int, MicrobatchSegment]:
        plan = self._plans(examples)
        capacity = plan.graph.capacity
        layouts = lay_out_all(plan.messages, capacity=capacity, status=sum(layout.status for layout in self._layouts))
        values, found = list(plan.graph.consts.values()), {}
        for level, segment in plan.microbatches.items():
            consts = tuple(values[i] for i in segment.reads("const"))
            writes = [layouts[number] for number in plan.sent_at(level)]
            function = segment_function(segment, segment.outputs, self._feed, layouts, writes)
            found[level] = MicrobatchSegment(function, segment_shapes(segment, self._feed, self._layouts), consts)
        return found


def segment_shapes(segment: Segment, feed: Feed, layouts: Sequence[Layout]) -> dict[str, Any]:
    """Return the shapes of a segment's inputs, in the structure of its argument."""
    shapes: dict[str, Any] = {kind: [] for kind in ("state", "op_state", "const", "batch", "prologue", "microbatch")}
    for var, origin in segment.inputs:
        if origin.kind in shapes:
            shapes[origin.kind].append(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype))
    shapes["floats"] = jax.ShapeDtypeStruct((1 + len(feed.floats),), np.float32)
    shapes["ints"] = jax.ShapeDtypeStruct((len(feed.ints) + feed.capacity,), np.int32)
    shapes["message"] = [
        [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in layouts[number].parts] for number in segment.read_messages
    ]
    return shapes
