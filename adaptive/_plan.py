"""What a step does, as plain data: segments, messages, slots and hooks. `_cut` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from math import lcm
from typing import Any

from jax.extend.core import JaxprEqn, Var

from ._errors import DriverError
from ._flow import Origin, Scope
from ._text import Line, as_text
from ._trace import Atom, Graph
from ._where import at
from .operators import Hook, Source


@dataclass(frozen=True)
class Contribution:
    """One leaf's place in a message."""

    name: str
    kind: str  # reduce | gather | broadcast
    op: str  # mean | sum | max | min
    root: int
    value: Atom
    weight: Atom | None
    result: Var
    scope: Scope  # of value and weight together
    line: str

    @property
    def signature(self) -> tuple:
        return (self.name, self.kind, self.op, self.root, self.value.aval.shape, str(self.value.aval.dtype), self.scope)


@dataclass(frozen=True)
class Segment:
    """A slice of the graph that becomes one XLA program."""

    kind: str  # once | call | final
    level: int
    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[tuple[Var, Origin], ...]
    outputs: tuple[Atom, ...]  # kept values; for the final segment, see Plan.final_outputs

    @cached_property
    def wiring(self) -> dict[str, list[tuple[Any, int]]]:
        """Where the inputs of each kind come from, in order."""
        kinds: dict[str, list[tuple[Any, int]]] = {
            kind: [] for kind in ("state", "slot", "const", "batch", "once", "call", "source", "message")
        }
        for _, origin in self.inputs:
            kinds[origin.kind].append((origin.index, origin.item))
        return kinds

    def reads(self, kind: str) -> list[int]:
        """Indices of the inputs of one kind, in order."""
        return [index for index, _ in self.wiring[kind]]

    @cached_property
    def message_levels(self) -> list[int]:
        """The messages that are read, in order."""
        return sorted(set(self.reads("message")))


@dataclass(frozen=True)
class Slot:
    """State that an operator carries from step to step."""

    name: str
    init: tuple[Any, ...]  # numpy arrays
    values: tuple[Var, ...]
    new: tuple[Atom, ...]
    scope: Scope
    line: str


@dataclass(frozen=True)
class HookPlan:
    hook: Hook
    values: tuple[Atom, ...]
    line: str


@dataclass(frozen=True)
class Plan:
    """What a step does, known before it runs, and the same on all workers."""

    graph: Graph
    messages: tuple[tuple[Contribution, ...], ...]
    calls: dict[int, Segment]
    onces: dict[int, Segment]
    final: Segment
    sources: tuple[Source, ...]
    slots: tuple[Slot, ...]
    hooks: tuple[HookPlan, ...]
    local_state: frozenset[int]
    unsplittable: tuple[str, ...] = field(default=())  # why a local batch cannot run as several calls; empty if it can

    @property
    def splittable(self) -> bool:
        return not self.unsplittable

    @property
    def multiple(self) -> int:
        """What sizes of local batches have to be multiples of."""
        return lcm(*(steps for steps, _ in self.graph.minibatches))

    def packs(self, level: int) -> Segment:
        """The segment that writes message `level`."""
        return self.calls[level] if level in self.calls else self.onces[level]

    @cached_property
    def changed_state(self) -> tuple[int, ...]:
        """The state leaves that a step changes; the others are passed through untouched."""
        pairs = zip(self.graph.state_vars, self.graph.new_state, strict=True)
        return tuple(i for i, (old, new) in enumerate(pairs) if old is not new)

    @cached_property
    def final_outputs(self) -> tuple[Atom, ...]:
        """What the final segment returns: changed state, slots, hook values, metrics, in this order."""
        state = [self.graph.new_state[i] for i in self.changed_state]
        slots = [a for s in self.slots for a in s.new]
        hooks = [a for h in self.hooks for a in h.values]
        return (*state, *slots, *hooks, *self.graph.metrics)

    @cached_property
    def signature(self) -> tuple:
        """All that must be equal between the plans of two sizes of one driver, and between workers."""
        segments = [*self.calls.values(), *self.onces.values(), self.final]
        return (
            tuple(tuple(c.signature for c in m) for m in self.messages),
            tuple(
                (s.kind, s.level, tuple(o for _, o in s.inputs if o.kind != "const"), len(s.outputs)) for s in segments
            ),
            tuple(sorted(s.name for s in self.sources)),
            tuple((s.name, tuple((a.shape, str(a.dtype)) for a in s.init), s.scope) for s in self.slots),
            tuple((h.hook.name, h.hook.every, tuple(a.aval.shape for a in h.values)) for h in self.hooks),
            tuple((a.aval.shape, str(a.aval.dtype)) for a in self.graph.metrics),
            self.unsplittable,
        )

    @cached_property
    def texts(self) -> list[list[Line]]:
        """What the segments say that are compiled once, for all sizes."""
        return [_text_of(self, segment) for segment in (*self.onces.values(), self.final)]


def check_same(reference: Plan, other: Plan) -> None:
    """A driver may neither communicate differently for another batch size, nor compute anything else with what it is
    told: that is compiled once.
    """
    sizes = f"for {other.graph.examples} examples than for {reference.graph.examples}"
    if reference.signature != other.signature:
        raise DriverError(
            f"driver {reference.graph.name!r} is another program {sizes}: its messages, hooks or state depend on the "
            "size of the batch. Use ad.batch_size() for the number of examples, not the shape, and no Python `if` on "
            "it."
        )
    for ours, theirs in zip(reference.texts, other.texts, strict=True):
        where = _first_difference(ours, theirs)
        if where is not None:
            raise DriverError(
                f"driver {reference.graph.name!r}{at(where)} is another program {sizes}, in what it computes once per "
                "step. A number taken from the batch's shape, such as len(batch), is there the size of one kernel call "
                "of one worker. Ask for the number that you mean:\n"
                "    ad.global_batch()      all examples of the step\n"
                "    ad.batch_size()        this worker's"
            )


def _text_of(plan: Plan, segment: Segment) -> list[Line]:
    if any(origin.kind in ("call", "batch") for _, origin in segment.inputs):
        return []  # it is of the whole local batch, and a size of its own is compiled for it
    outputs = list(plan.final_outputs if segment.kind == "final" else segment.outputs)
    if segment.kind == "once" and segment.level not in plan.calls:
        outputs += [a for c in plan.messages[segment.level] for a in (c.value, c.weight) if a is not None]
    return list(as_text([var for var, _ in segment.inputs], segment.eqns, outputs))


def _first_difference(ours: Sequence[Line], theirs: Sequence[Line]) -> str | None:
    """Where in the driver two texts begin to differ; `None` where they do not."""
    for one, other in zip_longest(ours, theirs, fillvalue=Line("")):
        if one.text != other.text:
            return one.where or other.where
    return None
