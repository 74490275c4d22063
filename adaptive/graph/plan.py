"""The plan of a step, as plain data: segments, messages, operator states and hooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from adaptive.base.values.jaxprs import JaxprEqn, Var
from adaptive.operators.collectives import Collective
from adaptive.operators.hooks import Hook
from adaptive.operators.sources import Source

from .flow import Origin, Scope
from .text import content
from .trace import Atom, Graph


@dataclass(frozen=True)
class Contribution:
    """One leaf of a collective, as part of a message."""

    name: str
    how: Collective
    value: Atom
    weight: Atom | None
    result: Var
    scope: Scope  # of value and weight together
    line: str
    when: Atom | None = None  # condition for sending it in a step; None if it is always sent

    @property
    def signature(self) -> tuple:
        gated = self.when is not None
        return (self.name, self.how, self.value.aval.shape, str(self.value.aval.dtype), self.scope, gated)


@dataclass(frozen=True)
class Message:
    """Contributions that are sent together. Messages are numbered in the order in which they are sent.

    Attributes:
      level: the number of levels of messages that arrive before it is sent. Messages of one level are sent together,
        and waited for one after another.
      gate: for a message with a condition (`when=`), the index of the condition among the values that the first
        prologue keeps. In steps without it, each worker's result is as if it were alone. `None` if it is always sent.
    """

    level: int
    contributions: tuple[Contribution, ...]
    gate: int | None = None

    @property
    def travels(self) -> bool:
        """Whether it is ever sent; if not, it is combined over the microbatches of one worker only."""
        return self.contributions[0].how.travels

    def __iter__(self) -> Iterator[Contribution]:
        return iter(self.contributions)

    def __len__(self) -> int:
        return len(self.contributions)

    def __getitem__(self, number: int) -> Contribution:
        return self.contributions[number]


@dataclass(frozen=True)
class Segment:
    """A slice of the graph that becomes one XLA program."""

    kind: str  # prologue | microbatch | final
    level: int
    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[tuple[Var, Origin], ...]
    outputs: tuple[Atom, ...]  # kept values; for the final segment, see Plan.final_outputs

    def reads(self, kind: str) -> list[int]:
        """Return the first indices of the inputs of one kind, in order."""
        return [origin.index for _, origin in self.inputs if origin.kind == kind]

    @cached_property
    def read_messages(self) -> list[int]:
        """The numbers of the messages that are read, in order."""
        return sorted(set(self.reads("message")))


@dataclass(frozen=True)
class OperatorState:
    """State that an operator carries from step to step."""

    name: str
    init: tuple[Any, ...]  # numpy arrays
    values: tuple[Var, ...]
    new: tuple[Atom, ...]
    scope: Scope
    line: str


@dataclass(frozen=True)
class HookPlan:
    """A hook in a plan, with its values and its line in the driver."""

    hook: Hook
    values: tuple[Atom, ...]
    line: str


@dataclass(frozen=True)
class Plan:
    """The plan of a step: known before it runs, and the same on all workers."""

    graph: Graph
    messages: tuple[Message, ...]
    microbatches: dict[int, Segment]
    prologues: dict[int, Segment]
    final: Segment
    sources: tuple[Source, ...]
    op_states: tuple[OperatorState, ...]
    hooks: tuple[HookPlan, ...]
    local_state: frozenset[int]
    unsplittable: tuple[str, ...] = field(default=())  # why a local batch cannot run as several microbatches
    one_size: str = ""  # why local batches cannot have other sizes than the first; "" if they can
    fixed: tuple[Atom, ...] = field(default=())  # values computed once per step, which must be the same for every size
    sized: frozenset[Var] = frozenset()  # values that depend on the microbatch size (see `expressions`)

    @property
    def splittable(self) -> bool:
        return not self.unsplittable

    @property
    def multiple(self) -> int:
        """The number of which local batch sizes must be multiples."""
        return self.graph.multiple

    @cached_property
    def has_local(self) -> bool:
        """Whether any state is local to a worker."""
        return bool(self.local_state) or any(op_state.scope != Scope.ALL for op_state in self.op_states)

    @cached_property
    def levels(self) -> int:
        """The number of times that a step waits for messages."""
        return 1 + max((m.level for m in self.messages), default=-1)

    def sent_at(self, level: int) -> tuple[int, ...]:
        """Return the numbers of one level's messages."""
        return tuple(number for number, m in enumerate(self.messages) if m.level == level)

    @cached_property
    def changed_state(self) -> tuple[int, ...]:
        """Indices of the state leaves that a step changes; others are passed through."""
        pairs = zip(self.graph.state_vars, self.graph.new_state, strict=True)
        return tuple(i for i, (old, new) in enumerate(pairs) if old is not new)

    @cached_property
    def final_outputs(self) -> tuple[Atom, ...]:
        """The outputs of the final segment: changed state, operator states, hook values, metrics, in this order."""
        state = [self.graph.new_state[i] for i in self.changed_state]
        op_states = [a for s in self.op_states for a in s.new]
        hooks = [a for h in self.hooks for a in h.values]
        return (*state, *op_states, *hooks, *self.graph.metrics)

    @cached_property
    def signature(self) -> tuple:
        """All properties that must be equal between the plans of two sizes, and between workers."""
        segments = [*self.microbatches.values(), *self.prologues.values(), self.final]
        return (
            tuple((m.level, m.gate, tuple(c.signature for c in m)) for m in self.messages),
            tuple(
                (s.kind, s.level, tuple(o for _, o in s.inputs if o.kind != "const"), len(s.outputs)) for s in segments
            ),
            tuple(sorted(s.name for s in self.sources)),
            tuple((s.name, tuple(map(content, s.init)), s.scope) for s in self.op_states),
            tuple((h.hook.name, h.hook.every, tuple(a.aval.shape for a in h.values)) for h in self.hooks),
            tuple((a.aval.shape, str(a.aval.dtype)) for a in self.graph.metrics),
            tuple((p.schedule, p.nbytes) for p in self.graph.pairings),
            self.unsplittable,
        )
