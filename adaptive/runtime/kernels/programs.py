"""Compiled programs that do not depend on batch sizes: prologues, sums over microbatches, and the final segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax

from adaptive.base.channel import PartSpec
from adaptive.base.reductions import Reduction
from adaptive.graph.plan import Plan
from adaptive.runtime.message import Layout, accumulate
from adaptive.runtime.placement import Placement
from adaptive.runtime.segment import Address, Feed, SegmentFunction, segment_function

from .compiled import Kernel, compile_kernel, with_constants
from .constants import Constants


class Programs(dict[tuple[str, int, int], Kernel]):
    """Compiled programs by kind, level and local index; `calls` are what is compiled."""

    def __init__(
        self,
        plan: Plan,
        feed: Feed,
        layouts: Sequence[Layout],
        placements: Sequence[Placement],
        constants: Constants,
        *,
        label: str,
    ):
        super().__init__()
        self._placements, self._label = placements, label
        # Each function is created once, so that JAX traces it once for all devices.
        segments: dict[tuple[str, int], SegmentFunction] = {
            **{("prologue", level): segment_function(plan, s, feed, layouts) for level, s in plan.prologues.items()},
            ("final", 0): segment_function(plan, plan.final, feed, layouts),
            **(_sums(plan, layouts) if plan.splittable else {}),
        }
        self.calls = {
            (*which, local_index): with_constants(call, constants, placement)
            for which, call in segments.items()
            for local_index, placement in enumerate(placements)
        }

    def jobs(self) -> list[Callable[[], None]]:
        """Return jobs that compile the programs; an empty list if they are compiled."""
        return [partial(self._compile, *which[:2]) for which in self.calls if not which[2] and which not in self]

    def compile(self) -> None:
        """Compile the programs, unless they are compiled."""
        for job in self.jobs():
            job()

    def _compile(self, kind: str, level: int) -> None:
        name = self._label + (kind if kind == "final" else f"{kind}_{level}")
        kernels: dict[Placement, Kernel] = {}  # workers of one place share a program
        for local_index, place in enumerate(self._placements):
            if place not in kernels:
                kernels[place] = compile_kernel(self.calls[kind, level, local_index], place, name)
            self[kind, level, local_index] = kernels[place]


def _sums(plan: Plan, layouts: Sequence[Layout]) -> dict[tuple[str, int], SegmentFunction]:
    """Return the programs that add a further microbatch's parts to those of the ones before, by level."""
    found = {}
    for level in plan.microbatches:
        sent: dict[Address, PartSpec] = {
            ("part", number, j): part for number in plan.sent_at(level) for j, part in enumerate(layouts[number].parts)
        }
        if sent:
            shapes, results = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in sent.values()], tuple(sent)
            add = _adder([p.op for p in sent.values()])
            found["add", level] = SegmentFunction(
                *(add, (*results, *results), (*shapes, *shapes), results, len(sent)),
                result_shapes=tuple(p.shape for p in sent.values()),
            )
    return found


def _adder(ops: Sequence[Reduction]) -> Callable[..., list[jax.Array]]:
    """Return a function of the parts of a worker's microbatches so far, and those of a further one."""
    return lambda *parts: accumulate(ops, parts[: len(ops)], parts[len(ops) :])
