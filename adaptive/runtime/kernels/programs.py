"""Compiled programs that do not depend on batch sizes: prologues, sums over microbatches, and the final segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from adaptive.base.reductions import Reduction
from adaptive.graph.plan import Plan
from adaptive.runtime.message import Layout, Part, accumulate
from adaptive.runtime.placement import Placement
from adaptive.runtime.segment import Address, Feed, SegmentFunction, segment_function

from .compile import compile_segment
from .constants import Constants
from .memory_bound import ran_out_of_memory

Segment = tuple[str, int]  # kind and level
_COMPILED = (
    "Memory ran out while XLA compiled a part of the step that does not depend on the batch size, such as the update "
    "of the state. It needs less memory with an optimizer that holds less, or on a device with more."
)


class Programs(dict[tuple[str, int, int], Callable[..., Any]]):
    """Compiled programs by kind, level and local index.

    Args:
      label: prefix of the programs' names.
      placements: where each worker of this process computes.
      constants: copies arrays to devices.

    Attributes:
      segments: what is compiled, by kind and level.
      consts: the arrays of the driver's closure that these read, by local index.
    """

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
        self._plan, self._layouts = plan, layouts
        self._placements, self._label = placements, label
        # Each function is created once, so that JAX traces it once for all devices.
        self.segments: dict[Segment, SegmentFunction] = {
            **{("prologue", level): segment_function(plan, s, feed, layouts) for level, s in plan.prologues.items()},
            ("final", 0): segment_function(plan, plan.final, feed, layouts),
            **(_sums(plan, layouts) if plan.splittable else {}),
        }
        self.consts = {
            which: [
                {address: constants.on(place.target, x) for address, x in call.consts.items()} for place in placements
            ]
            for which, call in self.segments.items()
        }

    def jobs(self) -> list[Callable[[], None]]:
        """Return jobs that compile the programs; an empty list if they are compiled."""
        if ("final", 0, len(self._placements) - 1) in self:
            return []
        return [partial(self._compile, *which, program) for which, program in self.segments.items()]

    def compile(self) -> None:
        """Compile the programs, unless they are compiled."""
        for job in self.jobs():
            job()

    def of(self, local_index: int) -> list[Callable[..., Any]]:
        """Return the compiled programs of one worker."""
        return [program for (_, _, of), program in list(self.items()) if of == local_index]

    def _compile(self, kind: str, level: int, program: SegmentFunction) -> None:
        name = self._label + (kind if kind == "final" else f"{kind}_{level}")
        for local_index, placement in enumerate(self._placements):
            if (kind, level, local_index) in self:
                continue
            first = self._placements.index(placement)  # the first worker there, whose program the others share
            if first < local_index:
                self[kind, level, local_index] = self[kind, level, first]
                continue
            try:
                self[kind, level, local_index] = compile_segment(
                    program.run,
                    placement.arguments(program),
                    placement.device,
                    name=name,
                    donate=program.donated,
                    results=placement.results(program),
                )
            except jax.errors.JaxRuntimeError as error:
                if ran_out_of_memory(error):  # compilers of accelerators allocate memory to try programs out
                    error.add_note(_COMPILED)
                raise


def _sums(plan: Plan, layouts: Sequence[Layout]) -> dict[Segment, SegmentFunction]:
    """Return the programs that add a further microbatch's parts to those of the ones before, by level."""
    found = {}
    for level in plan.microbatches:
        sent: dict[Address, Part] = {
            ("part", number, j): part for number in plan.sent_at(level) for j, part in enumerate(layouts[number].parts)
        }
        if sent:
            parts, addresses = list(sent.values()), tuple(sent)
            shapes = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parts]
            found["add", level] = SegmentFunction(
                _adder([p.op for p in parts]),
                (*addresses, *addresses),
                (*shapes, *shapes),
                addresses,
                len(parts),
                result_shapes=tuple(p.shape for p in parts),
            )
    return found


def _adder(ops: Sequence[Reduction]) -> Callable[..., list[jax.Array]]:
    """Return a function of the parts of a worker's microbatches so far, and those of a further one."""

    def add(*parts: jax.Array) -> list[jax.Array]:
        return accumulate(ops, parts[: len(ops)], parts[len(ops) :])

    return add
