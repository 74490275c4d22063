"""Partitioning of a graph into segments and messages, by backward slices from the values that each segment must
compute.

Each level has up to two segments, and the step one final segment. Each is a slice of the graph and one XLA program:

    prologue    values computed once per worker from earlier messages, which the microbatches of this level need
    microbatch  values that depend on the batch: runs for every microbatch, compiled for every size; its contributions
                to the message are accumulated over the microbatches
    final       after the last message: the new state, operator states, hook values and metrics; compiled once for all
                sizes

A value of an earlier segment is kept for a later one if it depends on the batch or on a message. Values that depend
only on state and sources, such as a learning rate, are computed again: that is cheaper than keeping them in memory. In
the common driver, only the gradient is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from adaptive.base.errors import DriverError
from adaptive.base.process.source_lines import at, line_of
from adaptive.base.values.jaxprs import JaxprEqn, Literal, Var, has_effects, has_ordered_effects
from adaptive.operators.collectives import operands
from adaptive.operators.hooks import hook_p
from adaptive.operators.sources import BATCH_SIZE, source_p

from .flow import Flow, Origin, Scope
from .plan import Contribution, HookPlan, Message, OperatorState, Plan, Segment
from .replication import check_replication
from .trace import Atom, Graph, operands_of


def plan(
    graph: Graph,
    *,
    local_state: Iterable[int] = (),
    sized: frozenset[Var] = frozenset(),
    whole: Iterable[str] = (),
) -> Plan:
    """Partition a graph into segments and messages, and check that values are replicated where they must be.

    Args:
      local_state: state leaves (by index) that may differ between workers by design.
      sized: variables that depend on the number of examples in a microbatch (see `expressions`).
      whole: further reasons why a local batch cannot run as several microbatches.

    Raises:
      ReplicationError: a hook value, a metric, or the new state can differ between workers.
      DriverError: ordered effects would run in another order.
    """
    flow = Flow(graph, frozenset(local_state), sized)
    check_replication(flow)
    return Partitioner(flow, tuple(whole)).cut()


def grouped(ready: Sequence[Contribution]) -> Iterable[Sequence[Contribution]]:
    """Group the collectives of one level into as few messages as possible, because each message costs time.

    Collectives that stay on their worker form one message, and so do those with the same `when=`. Collectives that are
    always sent come last.
    """
    groups: dict[tuple[bool, bool, Any], list[Contribution]] = {}
    for c in ready:
        when = c.when.val if isinstance(c.when, Literal) else c.when
        groups.setdefault((c.how.travels, c.when is None, when), []).append(c)
    return [groups[key] for key in sorted(groups, key=lambda key: key[:2])]


class _Draft:
    """A segment under construction."""

    def __init__(self, kind: str, level: int):
        self.kind, self.level = kind, level
        self.eqns: set[int] = set()
        self.inputs: dict[Var, Origin] = {}
        self.outputs: list[Atom] = []

    def keep(self, var: Atom) -> Origin:
        """Keep a value for a later segment, or for the engine."""
        if var not in self.outputs:
            self.outputs.append(var)
        return Origin(self.kind, self.level, self.outputs.index(var))

    def segment(self, eqns: Sequence[JaxprEqn]) -> Segment:
        inputs = tuple(sorted(self.inputs.items(), key=lambda item: item[1]))
        return Segment(self.kind, self.level, tuple(eqns[n] for n in sorted(self.eqns)), inputs, tuple(self.outputs))


class Partitioner:
    """Partitions one graph; see the module's docstring for the rules."""

    def __init__(self, flow: Flow, whole: tuple[str, ...]):
        self.flow, self.whole = flow, whole
        self.drafts: dict[tuple[str, int], _Draft] = {}
        self.homes: dict[int, _Draft] = {}  # segments of the equations that run once per step
        self.results: dict[Var, Origin] = {}  # origins of collectives' results
        self.hooks, self.op_states = self._ends()
        self.outputs = [*flow.graph.new_state, *(a for s in self.op_states for a in s.new)]
        self.outputs += [*(a for h in self.hooks for a in h.values), *flow.graph.metrics]
        self.messages = self._find_messages()
        self.levels = 1 + max((m.level for m in self.messages), default=-1)
        self.results = {
            c.result: Origin("message", number, i) for number, m in enumerate(self.messages) for i, c in enumerate(m)
        }

    def _ends(self) -> tuple[list[HookPlan], list[OperatorState]]:
        flow = self.flow
        hooks = [
            HookPlan(e.params["hook"], tuple(e.invars), line_of(e.source_info))
            for e in flow.graph.eqns
            if e.primitive is hook_p
        ]
        op_states: list[OperatorState] = []
        count: dict[str, int] = {}
        for k, (eqn, values, new) in enumerate(flow.op_states):
            label = eqn.params["label"]
            count[label] = count.get(label, -1) + 1
            scope = Scope.WORKER if k in flow.local_op_states else Scope.ALL
            init = tuple(eqn.params["init"].leaves)
            name, line = f"{label}/{count[label]}", line_of(eqn.source_info)
            op_states.append(OperatorState(name, init, values, new, scope, line))
        return hooks, op_states

    def _find_messages(self) -> list[Message]:
        """Return the messages of the collectives that are used, by level, and record the values `wanted` for them."""
        flow = self.flow
        effects = {n for n in flow.at_home if has_effects(flow.graph.eqns[n])}

        def needs(var: Var) -> Sequence[Atom]:  # a collective that is sent needs its weight too
            eqn = flow.graph.eqns[flow.producer[var]]
            return eqn.invars if flow.producer[var] in flow.communicates else operands_of(eqn)

        ends = [*self.outputs, *(a for n in effects for a in flow.graph.eqns[n].invars)]
        reached = flow.graph.upstream(ends, flow.origin.__contains__, needs)
        self.wanted = wanted = effects | {flow.producer[var] for var in reached if var not in flow.origin}
        levels: dict[int, list[Contribution]] = {}
        for number in sorted(wanted & flow.communicates):
            eqn = flow.graph.eqns[number]
            values, weight, when = operands(eqn.invars, eqn.params)
            names = eqn.params["names"] or ("",) * len(values)
            line = line_of(eqn.source_info)
            for name, value, result in zip(names, values, eqn.outvars, strict=True):
                scope = flow.scope_of([value] if weight is None else [value, weight])
                levels.setdefault(flow.level_of(eqn.invars), []).append(
                    Contribution(name, eqn.params["how"], value, weight, result, scope, line, when)
                )
        return [
            Message(level, tuple(group), self._gate(group[0]))
            for level in sorted(levels)
            for group in grouped(levels[level])
        ]

    def _gate(self, c: Contribution) -> int | None:
        """Compute whether a message is sent before the step's first microbatch. Returns the index of that value."""
        if c.when is None:
            return None
        first = self._draft("prologue", 0)
        if isinstance(c.when, Var) and c.when not in first.outputs:
            self._slice(first, [c.when])
        return first.keep(c.when).item

    def cut(self) -> Plan:
        for number in sorted(self.flow.at_home & self.wanted):
            self._settle(number)
        for level in range(self.levels):
            sent = [c for message in self.messages if message.level == level for c in message]
            needs = [a for c in sent for a in (c.value, c.weight) if isinstance(a, Var)]
            kind = "microbatch" if any(c.scope == Scope.MICROBATCH for c in sent) else "prologue"
            self._slice(self._draft(kind, level), needs)
        trial = _Draft("final", self.levels)
        self._slice(trial, self.outputs)  # only to find the values of microbatches that the final segment needs
        final = self.drafts["final", self.levels] = _Draft("final", self.levels)
        self._slice(final, self.outputs)
        return self._finish()

    def _settle(self, number: int) -> None:
        """Assign an equation that runs once per step to the first segment in which its operands are known."""
        eqn = self.flow.graph.eqns[number]
        kind = "microbatch" if self.flow.scope_of_equation(number) == Scope.MICROBATCH else "prologue"
        home = self._draft(kind, min(self.flow.level_of(eqn.invars), self.levels))
        self._check_order(eqn, home)
        self.homes[number] = home
        home.eqns.add(number)
        self._slice(home, eqn.invars)

    def _check_order(self, eqn: JaxprEqn, home: _Draft) -> None:
        """Check that ordered effects are in segments of the same order."""
        if not has_ordered_effects(eqn):
            return
        place = (home.level, home.kind == "microbatch")
        if self._last_ordered > place:
            raise DriverError(
                f"an ordered effect ({eqn.primitive.name}){at(line_of(eqn.source_info))} would run before an earlier "
                "one of the driver: operations without the batch run before those with it, in a separate program. "
                "Use ordered=False, or pass it a value computed from the batch."
            )
        self._last_ordered = place

    _last_ordered: tuple[int, bool] = (0, False)

    def _draft(self, kind: str, level: int) -> _Draft:
        return self.drafts.setdefault((kind, level), _Draft(kind, level))

    def _slice(self, draft: _Draft, atoms: Iterable[Atom]) -> None:
        """Add all equations to a draft that `atoms` depend on."""

        def is_there(var: Var) -> bool:
            origin = draft.inputs.get(var) or self.results.get(var) or self._given(draft, var) or self._kept(draft, var)
            if origin is not None:
                draft.inputs[var] = origin
            return origin is not None or self.flow.producer[var] in draft.eqns

        for var in self.flow.graph.upstream(atoms, is_there):
            if var not in draft.inputs:
                draft.eqns.add(self.flow.producer[var])

    def _given(self, draft: _Draft, var: Var) -> Origin | None:
        """Return the origin of an input of the step, or None.

        Constants that depend on the size come from the microbatch segment.
        """
        origin = self.flow.origin.get(var)
        if origin is not None and origin.kind == "const" and var in self.flow.sized and draft.kind != "microbatch":
            return self._demand("microbatch", draft.level, var)
        return origin

    def _kept(self, draft: _Draft, var: Var) -> Origin | None:
        """Return the origin of a value in an earlier segment, or None if it is computed here."""
        scope, level = self.flow.scope.get(var, Scope.ALL), self.flow.level.get(var, 0)
        number = self.flow.producer[var]
        home = self.homes.get(number)
        if home is not None:
            return None if home is draft else home.keep(var)
        if scope < Scope.MICROBATCH and level == 0:
            return None
        kind = "microbatch" if scope == Scope.MICROBATCH else "prologue"
        earlier = self.drafts.get((kind, level))
        if earlier is not None and earlier is not draft and number in earlier.eqns:
            return earlier.keep(var)
        is_computed_here = (kind == "microbatch") == (draft.kind == "microbatch")
        return None if is_computed_here else self._demand(kind, draft.level, var)

    def _demand(self, kind: str, level: int, var: Var) -> Origin:
        draft = self._draft(kind, level)
        self._slice(draft, [var])
        return draft.keep(var)

    def _finish(self) -> Plan:
        graph = self.flow.graph
        segments = {key: draft.segment(graph.eqns) for key, draft in self.drafts.items()}
        read = {o.index for s in segments.values() for _, o in s.inputs if o.kind == "source"}
        found = {e.params["source"].name: e.params["source"] for e in graph.eqns if e.primitive is source_p}
        return Plan(
            graph=graph,
            messages=tuple(self.messages),
            microbatches={level: s for (kind, level), s in sorted(segments.items()) if kind == "microbatch"},
            prologues={level: s for (kind, level), s in sorted(segments.items()) if kind == "prologue"},
            final=segments["final", self.levels],
            sources=tuple(s for name, s in found.items() if name in read),
            op_states=tuple(self.op_states),
            hooks=tuple(self.hooks),
            local_state=self.flow.local_state,
            unsplittable=(*self.whole, *self._reasons(segments)),
            fixed=tuple(self._fixed(segments)),
            sized=self.flow.sized,
        )

    def _fixed(self, segments: dict[tuple[str, int], Segment]) -> Iterable[Atom]:
        """Yield the values that are computed once per step or worker, and so must not depend on the microbatch size."""
        for segment in segments.values():
            if segment.kind == "prologue":
                yield from segment.outputs
        sent = (a for m in self.messages for c in m for a in (c.value, c.weight) if c.scope < Scope.MICROBATCH)
        yield from (a for a in (*sent, *self.outputs) if a is not None and self.flow.scope_of([a]) < Scope.MICROBATCH)

    def _reasons(self, segments: dict[tuple[str, int], Segment]) -> Iterable[str]:
        """Yield the reasons why a local batch cannot run as several microbatches."""
        yield from (how.why_whole for how in self.flow.graph.minibatches)
        for pairing in self.flow.graph.pairings:
            yield f"{pairing.line} publishes once per worker, and each microbatch would publish on its own"
        for message in self.messages:
            for c in message:
                if not c.how.reduces and c.scope == Scope.MICROBATCH:
                    yield (
                        f"{c.how.name}{at(c.line)} takes a value of the whole local batch, {c.name or 'an array'}; "
                        "each microbatch would have its own"
                    )
                elif c.scope == Scope.MICROBATCH:
                    yield from self._of_the_whole_batch(c)
        for segment in segments.values():
            taken = [o for _, o in segment.inputs if o.kind in ("microbatch", "batch")]
            if segment.kind == "final" and taken:
                yield "local state is computed from the whole local batch"

    def _of_the_whole_batch(self, c: Contribution) -> Iterable[str]:
        """Yield the reasons why a contribution belongs to the whole local batch: its value or weight depends on a
        source of scope "worker".
        """
        what = f"{c.how.name}{at(c.line)} of {c.name or 'a value'}"
        if c.weight is not None and self.flow.scope_of([c.value]) == Scope.MICROBATCH > self.flow.scope_of([c.weight]):
            yield (
                f"{what} would have the same weight in all microbatches, whatever their numbers of examples "
                "(ad.microbatch_size())"
            )
        elif BATCH_SIZE.name in self._sources_of((c.value, c.weight)):
            yield (f"{what} depends on ad.batch_size(), but microbatches have fewer examples (ad.microbatch_size())")

    def _sources_of(self, atoms: Iterable[Atom | None]) -> set[str]:
        """Return the names of the sources that values are computed from, back to the last message."""
        origins, results = self.flow.origin, self.results
        known = {*origins, *results}
        reached = self.flow.graph.upstream([a for a in atoms if a is not None], known.__contains__)
        found = [origins[var] for var in reached if var in origins and var not in results]
        return {origin.index for origin in found if origin.kind == "source"}
