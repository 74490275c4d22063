"""Where the graph is cut: segments, messages, slots and hooks, as plain data.

Two facts are propagated through the graph.

*Scope*: how widely a value is the same. `ALL` workers (it is replicated), all kernel calls of one `WORKER`, or one
`CALL` only. State starts as `ALL`, the batch as `CALL`, a source where it says; an equation's result is as narrow as
its narrowest operand; what comes out of a collective is `ALL`. Rule 2 (replication is checked, not hoped for) and
rule 4 (a micro-batch is a worker that runs after another) are both read off this one lattice.

*Level*: how many messages a value has to wait for. All collectives of one level travel in one message.

At each level there can be three segments, each a slice of the graph and a program of its own for XLA:

    once   what is computed once per worker from the messages before, and is wanted by the calls of this level
    call   what touches the batch: run for every kernel call, compiled for every size; its results that go into the
           message are accumulated over the calls
    final  (behind the last message) the new state, slots, hook values and metrics; compiled once, whatever the sizes

A value of an earlier segment is either kept for a later one (all that touches the batch, and whatever was computed from
a message), or computed again there (what comes from state and sources alone: a learning rate is cheaper than its way
through memory, and in the common driver nothing but the gradient crosses a cut).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.extend.core import DropVar, JaxprEqn, Var

from ._errors import DriverError, ReplicationError
from ._trace import Atom, Graph, describe, operands_of
from ._where import at, line_of
from .operators import Hook, Source, collective_p, hook_p, n_values, slot_read_p, slot_write_p, source_p


class Scope(IntEnum):
    """How widely a value is the same."""

    ALL = 0
    WORKER = 1
    CALL = 2


_SOURCE_SCOPE = {"all": Scope.ALL, "worker": Scope.WORKER, "call": Scope.CALL}


class Origin(NamedTuple):
    """Where a segment's input comes from: `kind` and its indices.

    ("state", i), ("batch", i), ("source", name), ("slot", k, leaf), ("const", i), ("message", level, contribution),
    ("once", level, i) and ("call", level, i): the i-th kept value of that segment.
    """

    kind: str
    index: Any
    item: int = 0


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


def plan(graph: Graph, *, local_state: Iterable[int] = ()) -> Plan:
    """Cut a graph into segments and messages, and check that all that must be replicated is.

    Args:
      local_state: state leaves (by index) that may differ between workers on purpose.

    Raises:
      ReplicationError: a hook, a metric, or the new state can differ between workers.
    """
    flow = _Flow(graph, frozenset(local_state))
    _check_replication(flow)
    return _Cutter(flow).cut()


# --- what is known of every value -------------------------------------------------------------------------------------


class _Flow:
    """Scope and level of every variable of a graph, and who makes and takes it."""

    def __init__(self, graph: Graph, local_state: frozenset[int]):
        self.graph = graph
        self.local_state = local_state
        self.producer: dict[Var, int] = {}
        for number, eqn in enumerate(graph.eqns):
            self.producer.update((v, number) for v in eqn.outvars if not isinstance(v, DropVar))
        self.origin = self._origins()
        self.slots = self._find_slots()
        self.local_slots: set[int] = set()
        while True:  # a slot is as narrow as what is written to it, which may be computed from the slot
            self._propagate()
            narrowed = {k for k, (_, _, new) in enumerate(self.slots) if self.scope_of(new) > Scope.ALL}
            if narrowed <= self.local_slots:
                break
            self.local_slots |= narrowed

    def _origins(self) -> dict[Var, Origin]:
        graph = self.graph
        origin = {v: Origin("state", i) for i, v in enumerate(graph.state_vars)}
        origin.update((v, Origin("batch", i)) for i, v in enumerate(graph.batch_vars))
        origin.update((v, Origin("const", i)) for i, v in enumerate(graph.consts))
        for eqn in graph.eqns:
            if eqn.primitive is source_p:
                origin[eqn.outvars[0]] = Origin("source", eqn.params["source"].name)
        return origin

    def _find_slots(self) -> list[tuple[JaxprEqn, tuple[Var, ...], tuple[Atom, ...]]]:
        writes = {e.invars[0]: tuple(e.invars[1:]) for e in self.graph.eqns if e.primitive is slot_write_p}
        slots: list[tuple[JaxprEqn, tuple[Var, ...], tuple[Atom, ...]]] = []
        for eqn in self.graph.eqns:
            if eqn.primitive is slot_read_p and eqn.outvars[0] in writes:
                values = tuple(eqn.outvars[1:])
                for leaf, var in enumerate(values):
                    self.origin[var] = Origin("slot", len(slots), leaf)
                slots.append((eqn, values, writes[eqn.outvars[0]]))
        return slots

    def scope_of(self, atoms: Sequence[Atom]) -> Scope:
        return max((self.scope.get(a, Scope.ALL) for a in atoms if isinstance(a, Var)), default=Scope.ALL)

    def level_of(self, atoms: Sequence[Atom]) -> int:
        return max((self.level.get(a, 0) for a in atoms if isinstance(a, Var)), default=0)

    def _propagate(self) -> None:
        graph = self.graph
        self.scope: dict[Var, Scope] = {}
        self.level: dict[Var, int] = {}
        self.communicates: set[int] = set()
        self.scope.update((graph.state_vars[i], Scope.WORKER) for i in self.local_state)
        self.scope.update((v, Scope.CALL) for v in graph.batch_vars)
        for k in self.local_slots:
            self.scope.update((v, Scope.WORKER) for v in self.slots[k][1])
        for number, eqn in enumerate(graph.eqns):
            if eqn.primitive is slot_read_p:
                continue
            if eqn.primitive is source_p:
                self.scope[eqn.outvars[0]] = _SOURCE_SCOPE[eqn.params["source"].scope]
                continue
            scope, level = self.scope_of(eqn.invars), self.level_of(eqn.invars)
            if eqn.primitive is collective_p:
                n = n_values(eqn.params, len(eqn.invars))
                if self.scope_of(eqn.invars[:n]) > Scope.ALL:
                    self.communicates.add(number)
                    level += 1
                else:
                    level = self.level_of(eqn.invars[:n])  # whatever its weight has to wait for
                scope = Scope.ALL
            for var in eqn.outvars:
                self.scope[var], self.level[var] = scope, level

    def operands(self, number: int) -> Sequence[Atom]:
        return operands_of(self.graph.eqns[number])


# --- rule 2 -----------------------------------------------------------------------------------------------------------


def _check_replication(flow: _Flow) -> None:
    graph = flow.graph
    for eqn in graph.eqns:
        if eqn.primitive is hook_p:
            _check_hook(flow, eqn)
    wrong = [
        i for i, new in enumerate(graph.new_state) if i not in flow.local_state and flow.scope_of([new]) > Scope.ALL
    ]
    if wrong:
        names = ", ".join(graph.state_names[i] for i in wrong[:3]) + (
            f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        )
        made, local = _trail(flow, graph.new_state[wrong[0]])
        raise ReplicationError(
            f"the new state can differ between workers: {names}{at(made)} comes from {local}, and no collective "
            "stands between.\nEach worker would train a model of its own. Reduce the gradients first:\n"
            "    grads = comm.all_reduce(grads)"
        )
    for name, atom in zip(graph.metric_names, graph.metrics, strict=True):
        if flow.scope_of([atom]) > Scope.ALL:
            _, local = _trail(flow, atom)
            raise ReplicationError(
                f"metric {name} can differ between workers: it comes from {local}.\n"
                f"A report has one value for all. Reduce it first:\n    comm.all_reduce(...)"
            )
    for eqn, _, new in flow.slots:
        if flow.scope_of(new) == Scope.CALL:
            raise ReplicationError(
                f"{describe(eqn)}{at(line_of(eqn.source_info))} averages over steps what belongs to one kernel call of "
                f"one worker: {_trail(flow, _narrowest(flow, new))[1]}. Reduce it first:  comm.all_reduce(...)"
            )


def _check_hook(flow: _Flow, eqn: JaxprEqn) -> None:
    hook: Hook = eqn.params["hook"]
    for position, atom in enumerate(eqn.invars):
        if flow.scope_of([atom]) == Scope.ALL:
            continue
        path = _leaf_path(hook, position)
        _, local = _trail(flow, atom)
        raise ReplicationError(
            f"hook {hook.name!r}{at(line_of(eqn.source_info))} reads a value that can differ between "
            f"workers: its {path}, which comes from {local}.\n"
            "One worker could then rescale while another does not. Reduce it first:\n"
            f"    comm.all_reduce(x)      one value for all      or      comm.all_gather(x)      one row per worker"
        )


def _leaf_path(hook: Hook, position: int) -> str:
    """ "2nd value, leaf .scale" for a leaf of a hook's values."""
    tree = jax.tree.unflatten(hook.tree, range(hook.tree.num_leaves))
    path = jax.tree_util.tree_leaves_with_path(tree)[position][0]
    nth = {0: "1st", 1: "2nd", 2: "3rd"}.get(path[0].idx, f"{path[0].idx + 1}th")
    rest = jax.tree_util.keystr(path[1:])
    return f"{nth} value" + (f" ({rest})" if rest else "")


def _narrowest(flow: _Flow, atoms: Sequence[Atom]) -> Atom:
    return max(atoms, key=lambda a: flow.scope_of([a]))


def _trail(flow: _Flow, atom: Atom) -> tuple[str, str]:
    """Where a local value was made, and what made it local: the driver's line, "this worker's examples
    (driver.py:14)".
    """
    made, last_line = "", ""
    while isinstance(atom, Var):
        origin = flow.origin.get(atom)
        if origin is not None:
            what = {
                "batch": "this worker's examples",
                "source": f"{origin.index!r}, which each worker measures for itself",
                "slot": "a moving average of local values",
                "state": "state marked as local",
            }[origin.kind]
            return made, what + at(last_line)
        eqn = flow.graph.eqns[flow.producer[atom]]
        line = line_of(eqn.source_info)
        made, last_line = made or line, line or last_line
        atom = _narrowest(flow, flow.operands(flow.producer[atom]))
    return made, "a local value" + at(last_line)


# --- cutting ----------------------------------------------------------------------------------------------------------


class _Draft:
    """A segment in the making."""

    def __init__(self, kind: str, level: int):
        self.kind, self.level = kind, level
        self.eqns: set[int] = set()
        self.inputs: dict[Var, Origin] = {}
        self.outputs: list[Var] = []

    def keep(self, var: Var) -> Origin:
        """Keep a value for a later segment."""
        if var not in self.outputs:
            self.outputs.append(var)
        return Origin(self.kind, self.level, self.outputs.index(var))


class _Cutter:
    """Slices backwards from what each segment must deliver. See the module's docstring for the rules."""

    def __init__(self, flow: _Flow):
        self.flow = flow
        self.drafts: dict[tuple[str, int], _Draft] = {}
        self.hooks, self.slots = self._ends()
        self.outputs = [*flow.graph.new_state, *(a for s in self.slots for a in s.new)]
        self.outputs += [*(a for h in self.hooks for a in h.values), *flow.graph.metrics]
        self.messages = self._find_messages()
        self.results = {
            c.result: Origin("message", level, i) for level, m in enumerate(self.messages) for i, c in enumerate(m)
        }

    def _ends(self) -> tuple[list[HookPlan], list[Slot]]:
        flow = self.flow
        hooks = [
            HookPlan(e.params["hook"], tuple(e.invars), line_of(e.source_info))
            for e in flow.graph.eqns
            if e.primitive is hook_p
        ]
        slots: list[Slot] = []
        count: dict[str, int] = {}
        for k, (eqn, values, new) in enumerate(flow.slots):
            label = eqn.params["label"]
            count[label] = count.get(label, -1) + 1
            scope = Scope.WORKER if k in flow.local_slots else Scope.ALL
            init = tuple(eqn.params["init"].leaves)
            slots.append(Slot(f"{label}/{count[label]}", init, values, new, scope, line_of(eqn.source_info)))
        return hooks, slots

    def _find_messages(self) -> list[tuple[Contribution, ...]]:
        """All communicating collectives that anything depends on, by level."""
        flow = self.flow
        wanted: set[int] = set()
        stack = [a for a in self.outputs if isinstance(a, Var)]
        while stack:
            number = flow.producer.get(stack.pop())
            if number is None or number in wanted:
                continue
            wanted.add(number)
            takes = flow.graph.eqns[number].invars if number in flow.communicates else flow.operands(number)
            stack += [a for a in takes if isinstance(a, Var) and a not in flow.origin]
        levels: dict[int, list[Contribution]] = {}
        for number in sorted(wanted & flow.communicates):
            eqn = flow.graph.eqns[number]
            n = n_values(eqn.params, len(eqn.invars))
            weight = eqn.invars[n] if n < len(eqn.invars) else None
            names = eqn.params["names"] or ("",) * n
            line = line_of(eqn.source_info)
            for name, value, result in zip(names, eqn.invars[:n], eqn.outvars, strict=True):
                scope = flow.scope_of([value] if weight is None else [value, weight])
                params = eqn.params
                levels.setdefault(flow.level_of(eqn.invars), []).append(
                    Contribution(name, params["kind"], params["op"], params["root"], value, weight, result, scope, line)
                )
        return [tuple(levels[level]) for level in sorted(levels)]

    def cut(self) -> Plan:
        last = len(self.messages)
        for level, message in enumerate(self.messages):
            needs = [a for c in message for a in (c.value, c.weight) if isinstance(a, Var)]
            if any(c.scope == Scope.CALL for c in message):
                self._slice(self._draft("call", level), needs)
            else:
                self._slice(self._draft("once", level), needs)
        trial = _Draft("final", last)
        self._slice(trial, self.outputs)  # only to learn which values of calls the final segment asks for
        final = self.drafts["final", last] = _Draft("final", last)
        self._slice(final, self.outputs)
        return self._finish()

    def _draft(self, kind: str, level: int) -> _Draft:
        return self.drafts.setdefault((kind, level), _Draft(kind, level))

    def _slice(self, draft: _Draft, atoms: Iterable[Atom]) -> None:
        """Add to a draft all that is needed to know `atoms`."""
        stack = [a for a in atoms if isinstance(a, Var)]
        while stack:
            var = stack.pop()
            if var in draft.inputs:
                continue
            origin = self.results.get(var) or self.flow.origin.get(var) or self._kept(draft, var)
            if origin is not None:
                draft.inputs[var] = origin
                continue
            number = self.flow.producer[var]
            if number not in draft.eqns:
                draft.eqns.add(number)
                stack += [a for a in self.flow.operands(number) if isinstance(a, Var)]

    def _kept(self, draft: _Draft, var: Var) -> Origin | None:
        """From which earlier segment a value is taken; `None` where it is computed here."""
        scope, level = self.flow.scope.get(var, Scope.ALL), self.flow.level.get(var, 0)
        number = self.flow.producer[var]
        if scope == Scope.CALL:
            earlier = self.drafts.get(("call", level))
            if earlier is not None and earlier is not draft and number in earlier.eqns:
                return earlier.keep(var)
            if draft.kind == "call":
                return None
            return self._demand("call", draft.level, var)
        if level == 0:
            return None
        earlier = self.drafts.get(("once", level))
        if earlier is not None and earlier is not draft and number in earlier.eqns:
            return earlier.keep(var)
        return self._demand("once", draft.level, var) if draft.kind == "call" else None

    def _demand(self, kind: str, level: int, var: Var) -> Origin:
        draft = self._draft(kind, level)
        self._slice(draft, [var])
        return draft.keep(var)

    def _finish(self) -> Plan:
        graph = self.flow.graph
        segments = {key: self._segment(draft) for key, draft in self.drafts.items()}
        read = {o.index for s in segments.values() for _, o in s.inputs if o.kind == "source"}
        found = {e.params["source"].name: e.params["source"] for e in graph.eqns if e.primitive is source_p}
        return Plan(
            graph=graph,
            messages=tuple(self.messages),
            calls={level: s for (kind, level), s in sorted(segments.items()) if kind == "call"},
            onces={level: s for (kind, level), s in sorted(segments.items()) if kind == "once"},
            final=segments["final", len(self.messages)],
            sources=tuple(s for name, s in found.items() if name in read),
            slots=tuple(self.slots),
            hooks=tuple(self.hooks),
            local_state=self.flow.local_state,
            unsplittable=tuple(self._reasons(segments)),
        )

    def _segment(self, draft: _Draft) -> Segment:
        eqns = tuple(self.flow.graph.eqns[n] for n in sorted(draft.eqns))
        return Segment(draft.kind, draft.level, eqns, tuple(draft.inputs.items()), tuple(draft.outputs))

    def _reasons(self, segments: dict[tuple[str, int], Segment]) -> Iterable[str]:
        """Why a local batch cannot run as several calls."""
        for message in self.messages:
            for c in message:
                if c.kind != "reduce" and c.scope == Scope.CALL:
                    what = "all_gather" if c.kind == "gather" else "broadcast"
                    yield (
                        f"{what}{at(c.line)} takes a value of the whole local batch, {c.name or 'an array'}; the "
                        "calls that a batch is split into would have one each"
                    )
        for segment in segments.values():
            taken = [o for _, o in segment.inputs if o.kind in ("call", "batch")]
            if segment.kind == "final" and taken:
                yield "local state is computed from the whole local batch"


def check_same(reference: Plan, other: Plan) -> None:
    """A driver may not communicate differently for another batch size."""
    if reference.signature != other.signature:
        raise DriverError(
            f"driver {reference.graph.name!r} is another program for {other.graph.examples} examples than for "
            f"{reference.graph.examples}: its messages, hooks or state depend on the size of the batch. Use "
            "ad.batch_size() for the number of examples, not the shape, and no Python `if` on it."
        )
