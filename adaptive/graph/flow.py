"""Propagation of two properties through a driver's graph: the scope and the level of each value.

*Scope*: where a value is the same: on `ALL` workers (it is replicated), in all microbatches of one `WORKER`, or in one
`MICROBATCH` only. State has scope `ALL`; the batch and numbers of its shape, `MICROBATCH`; a source, its own scope; the
result of a callback, `WORKER`. An equation's result has the narrowest scope of its operands, and a collective's result
is `ALL`. Rule 2 (replication is checked) and rule 4 (a microbatch counts like a worker) both follow from this lattice.

*Level*: the number of messages that a value waits for, one after another. All collectives of one level are sent
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from adaptive.base.values.jaxprs import DropVar, JaxprEqn, Var, asks_the_host, has_effects
from adaptive.operators.collectives import collective_p, operands
from adaptive.operators.operator_state import state_read_p, state_write_p
from adaptive.operators.replication_claims import assert_scope_p
from adaptive.operators.sources import source_p

from .trace import Atom, Graph


class Scope(IntEnum):
    """Where a value is the same; each scope is narrower than the one before."""

    ALL = 0
    WORKER = 1
    MICROBATCH = 2


_SOURCE_SCOPE = {"all": Scope.ALL, "worker": Scope.WORKER, "microbatch": Scope.MICROBATCH}


class Origin(NamedTuple):
    """The origin of a segment's input: `kind` and its indices.

    ("state", i), ("batch", i), ("source", name), ("op_state", k, leaf), ("const", i), ("message", level, contribution),
    ("prologue", level, i) and ("microbatch", level, i): the i-th kept value of that segment.
    """

    kind: str
    index: Any
    item: int = 0


class Flow:
    """Scope, level, origin and producer of every variable of a graph.

    Args:
      local_state: state leaves (by index) that may differ between workers by design.
      sized: variables that depend on the number of examples in a microbatch (see `expressions`).
    """

    def __init__(self, graph: Graph, local_state: frozenset[int], sized: frozenset[Var] = frozenset()):
        self.graph = graph
        self.local_state, self.sized = local_state, sized
        self.at_home = at_home(graph)
        self.producer: dict[Var, int] = {}
        for number, eqn in enumerate(graph.eqns):
            self.producer.update((v, number) for v in eqn.outvars if not isinstance(v, DropVar))
        self.origin = self._origins()
        self.op_states = self._find_op_states()
        self.local_op_states: set[int] = set()
        while True:  # an operator state has the scope of the values written to it, which may depend on it
            self._propagate()
            narrowed = {k for k, (_, _, new) in enumerate(self.op_states) if self.scope_of(new) > Scope.ALL}
            if narrowed <= self.local_op_states:
                break
            self.local_op_states |= narrowed

    def _origins(self) -> dict[Var, Origin]:
        graph = self.graph
        origin = {v: Origin("state", i) for i, v in enumerate(graph.state_vars)}
        origin.update((v, Origin("batch", i)) for i, v in enumerate(graph.batch_vars))
        origin.update((v, Origin("const", i)) for i, v in enumerate(graph.consts))
        for eqn in graph.eqns:
            if eqn.primitive is source_p:
                origin[eqn.outvars[0]] = Origin("source", eqn.params["source"].name)
        return origin

    def _find_op_states(self) -> list[tuple[JaxprEqn, tuple[Var, ...], tuple[Atom, ...]]]:
        writes = {e.invars[0]: tuple(e.invars[1:]) for e in self.graph.eqns if e.primitive is state_write_p}
        op_states: list[tuple[JaxprEqn, tuple[Var, ...], tuple[Atom, ...]]] = []
        for eqn in self.graph.eqns:
            if eqn.primitive is state_read_p and eqn.outvars[0] in writes:
                values = tuple(eqn.outvars[1:])
                for leaf, var in enumerate(values):
                    self.origin[var] = Origin("op_state", len(op_states), leaf)
                op_states.append((eqn, values, writes[eqn.outvars[0]]))
        return op_states

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
        self.scope.update((v, Scope.MICROBATCH) for v in graph.batch_vars)
        self.scope.update((v, Scope.MICROBATCH) for v in graph.consts if v in self.sized)
        for k in self.local_op_states:
            self.scope.update((v, Scope.WORKER) for v in self.op_states[k][1])
        for number, eqn in enumerate(graph.eqns):
            if eqn.primitive is state_read_p:
                continue
            if eqn.primitive is source_p:
                self.scope[eqn.outvars[0]] = _SOURCE_SCOPE[eqn.params["source"].scope]
                continue
            scope, level = self.scope_of(eqn.invars), self.level_of(eqn.invars)
            if eqn.primitive is collective_p:
                scope, level = self._combined(number, eqn)
            elif eqn.primitive is assert_scope_p:
                replicated = eqn.params["scope"] == "replicated"
                for var, operand in zip(eqn.outvars, eqn.invars, strict=True):
                    self.scope[var] = Scope.ALL if replicated else self.scope_of([operand])
                    self.level[var] = self.level_of([operand])
                continue
            elif number in self.at_home:
                scope = max(scope, Scope.WORKER)
            for var in eqn.outvars:
                narrow = var in self.sized and eqn.primitive is not collective_p
                self.scope[var], self.level[var] = Scope.MICROBATCH if narrow else scope, level

    def _combined(self, number: int, eqn: JaxprEqn) -> tuple[Scope, int]:
        """Return scope and level of a collective's results. Records whether it sends a message."""
        how, values = eqn.params["how"], operands(eqn.invars, eqn.params).values
        own, known = self.scope_of(values), Scope.ALL if how.travels else Scope.WORKER
        if own <= known:  # the result is known already
            return own, self.level_of(values)  # its weight is not needed
        self.communicates.add(number)
        shared = how.result_is_replicated and how.travels and not eqn.params["gated"]
        return Scope.ALL if shared else Scope.WORKER, self.level_of(eqn.invars) + 1

    def scope_of_equation(self, number: int) -> Scope:
        """Return the scope of an equation's effects, even if it has no results."""
        eqn = self.graph.eqns[number]
        scope = max(self.scope_of(eqn.invars), Scope.WORKER if number in self.at_home else Scope.ALL)
        return Scope.MICROBATCH if any(v in self.sized for v in eqn.outvars) else scope


def at_home(graph: Graph) -> frozenset[int]:
    """Return the equations that must run once per step, in one segment: those with effects, and calls of the host."""
    return frozenset(n for n, e in enumerate(graph.eqns) if has_effects(e) or asks_the_host(e))
