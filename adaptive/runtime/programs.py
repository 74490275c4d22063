"""Compiled programs that do not depend on batch sizes: prologues, sums over microbatches, and the final segment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from adaptive.base.reductions import Reduction
from adaptive.graph.plan import Plan

from .compile import compile_segment
from .constants import Constants
from .kernels.memory_bound import ran_out_of_memory
from .message import Layout, Part, accumulate
from .placement import Placement
from .segment import Address, Feed, SegmentFunction, segment_function

Segment = tuple[str, int]  # kind and level
_COMPILED = (
    "Memory ran out while XLA compiled a part of the step that does not depend on the batch size, such as the update "
    "of the state. It needs less memory with an optimizer that holds less, or on a device with more."
)


class Programs(dict[tuple[str, int, int], Callable[..., Any]]):
    """Compiled programs by kind, level and local index.

    Steps of one microbatch need no sums. So the programs that sum the parts of several microbatches are compiled on
    first use, unless `compile_sums` was called before.

    Args:
      label: prefix of the programs' names.
      placements: where each worker of this process computes.
      constants: copies arrays to devices.

    Attributes:
      segments: the prologues and the final segment as functions, by kind and level.
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
        }
        self.consts = {
            which: [
                {address: constants.on(place.target, x) for address, x in call.consts.items()} for place in placements
            ]
            for which, call in self.segments.items()
        }
        self._sums = self._sum_programs()
        self._lock = threading.Lock()  # the compiler's thread and the steps' thread may need the same sum

    def jobs(self) -> list[Callable[[], None]]:
        """Return jobs that compile the programs of every step; an empty list if they are compiled."""
        if ("final", 0, len(self._placements) - 1) in self:
            return []
        return [partial(self._compile, *which, program) for which, program in self.segments.items()]

    def missing(self, *, with_sums: bool) -> int:
        """Return the number of programs to compile before a first step.

        Args:
          with_sums: whether the step runs several microbatches.
        """
        once = 0 if self else len(self._plan.prologues) + 1 + with_sums * len(self._sums)
        return once * len(self._placements)

    def of(self, local_index: int) -> list[Callable[..., Any]]:
        """Return the compiled programs of one worker."""
        return [program for (_, _, of), program in list(self.items()) if of == local_index]

    def compile_sums(self) -> None:
        """Compile the programs that sum the parts of several microbatches, unless they are compiled."""
        with self._lock:
            for (kind, level), program in self._sums.items():
                self._compile(kind, level, program)

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

    def __missing__(self, key: tuple[str, int, int]) -> Callable[..., Any]:
        if key[:2] not in self._sums:
            raise KeyError(key)
        self.compile_sums()
        return self[key]

    def _sum_programs(self) -> dict[Segment, SegmentFunction]:
        found = {}
        for level in self._plan.microbatches:
            sent: dict[Address, Part] = {
                ("part", number, j): part
                for number in self._plan.sent_at(level)
                for j, part in enumerate(self._layouts[number].parts)
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
