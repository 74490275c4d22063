"""The positions of a segment's inputs and results, computed once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax

from adaptive.graph.plan import Plan, Segment

from .message import Layout


class SegmentInputs:
    """The origins of a segment's inputs, by kind and in order.

    Attributes:
      batch: indices of the batch's leaves.
      prologue, microbatch: values of earlier segments, as (level, index of the kept value).
      messages: numbers of the messages.
      in_step: whether an input comes from an earlier segment or message of the step.
    """

    def __init__(self, segment: Segment):
        self._state, self._op_states = segment.reads("state"), segment.wiring["op_state"]
        self.batch, self.messages = segment.reads("batch"), segment.read_messages
        self.prologue, self.microbatch = segment.wiring["prologue"], segment.wiring["microbatch"]
        self.in_step = bool(self.prologue or self.microbatch or self.messages)

    def of_state(self, state: Sequence[jax.Array], op_states: Sequence[Sequence[jax.Array]]) -> dict[str, Any]:
        """Return the segment's inputs from a worker's state; those from earlier in the step are left empty."""
        return {
            "state": [state[i] for i in self._state],
            "op_state": [op_states[k][leaf] for k, leaf in self._op_states],
            "prologue": [],
            "microbatch": [],
            "message": [],
        }


class FinalResults:
    """The leaves of the state that the final segment overwrites, and the positions of its results.

    Attributes:
      overwritten, read_only: indices of the state's leaves that it reads, in order.
      op_states, hooks: for each operator state or hook, a slice of `Plan.final_outputs`.
      metrics: the slice of the metrics.
    """

    def __init__(self, plan: Plan):
        read, changed = plan.final.reads("state"), set(plan.changed_state)
        self.overwritten = [i for i in read if i in changed]
        self.read_only = [i for i in read if i not in changed]
        counts = [len(plan.changed_state), *(len(s.new) for s in plan.op_states), *(len(h.values) for h in plan.hooks)]
        ends = list(accumulate([*counts, len(plan.graph.metrics)]))
        _, *found = [slice(0, ends[0]), *(slice(start, end) for start, end in pairwise(ends))]
        n = len(plan.op_states)
        self.op_states, self.hooks, self.metrics = found[:n], found[n:-1], found[-1]


def bytes_per_execution(plan: Plan, layouts: Sequence[Layout]) -> int:
    """Return the bytes of the parts that a microbatch writes, at the level with most of them."""
    of_messages = [sum(math.prod(p.shape) * p.dtype.itemsize for p in layout.parts) for layout in layouts]
    return max((sum(of_messages[number] for number in plan.sent_at(level)) for level in plan.microbatches), default=0)


def part_slices(plan: Plan, layouts: Sequence[Layout]) -> list[slice]:
    """Return for each message the slice of its parts among those of its level."""
    places: dict[int, slice] = {}
    for level in range(plan.levels):
        sent = plan.sent_at(level)
        ends = accumulate((len(layouts[number].parts) for number in sent), initial=0)
        places.update((number, slice(*found)) for number, found in zip(sent, pairwise(ends), strict=True))
    return [places[number] for number in range(len(layouts))]
