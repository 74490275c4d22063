"""Data dependencies within a step: which reductions a value is computed from.

One forward pass over the graph. `check` uses it to find which results a difference can reach, and which values depend
on the split by design.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from adaptive.base.source_lines import at, line_of
from adaptive.graph.flow import Scope
from adaptive.graph.plan import Contribution, Plan
from adaptive.graph.trace import Atom, operands_of
from adaptive.operators.collectives import collective_p
from adaptive.operators.operator_state import state_read_p
from adaptive.operators.replication_claims import assert_scope_p
from adaptive.operators.sources import EXAMPLES, MICROBATCHES, WORKERS, source_p

Place = tuple[int, int]  # a contribution: (message, index in the message)
_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class Facts:
    """Dependencies of one value.

    Attributes:
      through: the contributions that it is computed from, and the numbers of workers (`Influence.counts`), by more than
        checks whether they are finite; bit mask.
      op_states: the operator states that it is computed from; bit mask.
      of_data: whether it depends on examples, on the number of examples in a microbatch (the batch's shape), or on
        per-worker state.
      sources: names of the sources of scope "microbatch" that it is computed from, other than as the weight of a mean.
    """

    through: int = 0
    op_states: int = 0
    of_data: bool = False
    sources: frozenset[str] = frozenset()


_NOTHING = Facts()


def _joined(facts: Sequence[Facts]) -> Facts:
    if len(facts) < 2:
        return facts[0] if facts else _NOTHING
    through = op_states = 0
    for f in facts:
        through, op_states = through | f.through, op_states | f.op_states
    return Facts(through, op_states, any(f.of_data for f in facts), frozenset().union(*(f.sources for f in facts)))


class Influence:
    """Dependencies of every value of a plan.

    Attributes:
      counts: where the driver reads the number of workers, by the bit of each: `ad.num_workers()`, and collectives of
        equal values that count the workers, such as a sum.
    """

    def __init__(self, plan: Plan):
        graph = plan.graph
        self.places: list[Place] = [(level, i) for level, m in enumerate(plan.messages) for i in range(len(m))]
        self.bit = {place: 1 << n for n, place in enumerate(self.places)}
        self._results = {plan.messages[level][i].result: (level, i) for level, i in self.places}
        self._plan = plan
        self.counts: dict[int, str] = {}
        self._facts: dict[Var, Facts] = {v: Facts(of_data=True) for v in graph.batch_vars}
        self._facts.update((graph.state_vars[i], Facts(of_data=True)) for i in plan.local_state)
        self._facts.update((v, Facts(of_data=True)) for v in graph.consts if v in plan.sized)
        for k, s in enumerate(plan.op_states):
            self._facts.update((v, Facts(op_states=1 << k, of_data=s.scope > Scope.ALL)) for v in s.values)
        for eqn in graph.eqns:
            if eqn.primitive is collective_p:
                self._of_collective(eqn)
            elif eqn.primitive is source_p:
                name = eqn.params["source"].name
                if name in (EXAMPLES.name, MICROBATCHES.name):
                    self._facts[eqn.outvars[0]] = Facts(sources=frozenset([name]))
                elif name == WORKERS.name:
                    self._facts[eqn.outvars[0]] = self._of_count("ad.num_workers()", eqn)
            elif eqn.primitive is assert_scope_p:
                self._facts.update((v, self.of(a)) for a, v in zip(eqn.invars, eqn.outvars, strict=True))
            elif eqn.primitive is not state_read_p:
                self._of_equation(eqn)

    def of(self, atom: Atom) -> Facts:
        return self._facts.get(atom, _NOTHING) if isinstance(atom, Var) else _NOTHING

    def carried(self, contribution: Contribution) -> Facts:
        """Return the facts of a contribution's value, without its weight."""
        return self.of(contribution.value)

    def _of_equation(self, eqn: JaxprEqn) -> None:
        known = _joined([self.of(a) for a in eqn.invars])
        if self._asks_if_finite(eqn):
            known = replace(known, through=0)
        for var in eqn.outvars:
            self._facts[var] = replace(known, of_data=known.of_data or var in self._plan.sized)

    def _asks_if_finite(self, eqn: JaxprEqn) -> bool:
        """Return whether all finite values give the same result: `isfinite`, `isnan` (`x != x`) or `isinf`."""
        if eqn.primitive.name == "is_finite":
            return True
        if eqn.primitive.name not in _COMPARES:
            return False
        a, b = eqn.invars
        return (isinstance(a, Var) and a is b) or any(map(self._is_infinite, (a, b)))

    def _is_infinite(self, atom: Atom) -> bool:
        value = self._plan.graph.consts.get(atom) if isinstance(atom, Var) else atom.val
        return value is not None and _is_number(value) and np.size(value) == 1 and bool(np.isinf(value).all())

    def _of_collective(self, eqn: JaxprEqn) -> None:
        for value, result in zip(operands_of(eqn), eqn.outvars, strict=True):
            known = self.of(value)
            if result in self._results:
                level, i = place = self._results[result]
                c = self._plan.messages[level][i]
                weight = _NOTHING if c.weight is None else replace(self.of(c.weight), sources=frozenset())
                known = _joined([known, weight, Facts(through=self.bit[place])])
            elif _counts_workers(eqn):
                known = _joined([known, self._of_count(f"{eqn.params['how'].about} of equal values", eqn)])
            self._facts[result] = known

    def _of_count(self, what: str, eqn: JaxprEqn) -> Facts:
        """Return the facts of a number of workers. Each place in the driver has a bit of its own."""
        where = f"{what}{at(line_of(eqn.source_info))}"
        bit = next((bit for bit, known in self.counts.items() if known == where), 0)
        bit = bit or 1 << len(self.places) + len(self.counts)
        self.counts[bit] = where
        return Facts(through=bit)


def _counts_workers(eqn: JaxprEqn) -> bool:
    """Return whether a collective's result for values that are equal on all workers depends on who takes part."""
    how, value = eqn.params["how"], operands_of(eqn)[0]
    taking_part = jax.ShapeDtypeStruct((eqn.params["capacity"],), np.bool_)
    jaxpr = jax.make_jaxpr(how.of_replicated)(jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype), taking_part)
    return any(jaxpr.jaxpr.invars[1] in e.invars for e in jaxpr.jaxpr.eqns)


def steps_named(plan: Plan, source: str) -> list[int]:
    """Return the integers that a driver compares or combines a source with: `ad.step_number() > 500` gives 500."""
    follows: set[Var] = set()
    named: set[int] = set()
    # Of constants, and of what is computed from constants alone: `jnp.remainder` selects and converts its divisor.
    numbers = {var: _whole(value) for var, value in plan.graph.consts.items()}
    for eqn in plan.graph.eqns:
        if eqn.primitive is source_p:
            follows.update(eqn.outvars if eqn.params["source"].name == source else ())
            continue
        if eqn.primitive is collective_p:
            continue
        of_inputs = [numbers.get(a) if isinstance(a, Var) else _whole(a.val) for a in eqn.invars]
        known = set().union(*(found for found in of_inputs if found))
        if any(isinstance(a, Var) and a in follows for a in eqn.invars):
            follows.update(v for v in eqn.outvars if getattr(v.aval, "shape", None) == ())
            named.update(known)
        elif None not in of_inputs:
            numbers.update(dict.fromkeys(eqn.outvars, known))
    return sorted(n for n in named if n > 1)


def _whole(value: Any) -> set[int]:
    """Return the whole part of a constant with a single number, in a set; an empty set for any other constant."""
    if np.size(value) != 1 or not _is_number(value):
        return set()
    number = np.asarray(value).reshape(())
    return {int(number)} if np.isfinite(number) and abs(number) < 2**31 - 2 else set()


def _is_number(value: Any) -> bool:
    dtype: Any = getattr(value, "dtype", np.asarray(value).dtype)
    return jnp.issubdtype(dtype, np.floating) or jnp.issubdtype(dtype, np.integer)
