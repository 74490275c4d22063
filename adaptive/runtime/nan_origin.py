"""The origin of the first value that is not finite, in the driver's lines.

Compiled programs return only the values that later segments need. So if a worker's contributions are not finite, its
step is computed again up to them, equation by equation. Then the graph is walked back from the contribution to the
equation that computed the first NaN or infinity from finite operands, or to an input. This takes long, and is done only
for errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from adaptive.base.jaxprs import has_effects
from adaptive.base.source_lines import at, line_of
from adaptive.graph.plan import Plan
from adaptive.graph.trace import Atom, describe, operands_of
from adaptive.operators.peer_read import publishes

from .segment import evaluate


class _Kind(IntEnum):
    FINITE = 0
    INFINITE = 1
    NAN = 2


_PLURAL = {_Kind.INFINITE: "infinities", _Kind.NAN: "NaNs"}


def nan_origin(plan: Plan, known: Mapping[Var, Any], atoms: Sequence[Atom], taking_part: jax.Array) -> str:
    """Return a description of the origin of the first value that makes one of `atoms` not finite.

    Args:
      plan: the plan of the microbatch.
      known: values of all inputs of the graph: state, batch, constants, operator states, sources, earlier messages.
      atoms: values of the graph.
      taking_part: whether each worker has examples in the step; boolean, shape=(capacity,).

    Returns:
      "the first NaNs come from log (driver.py:12)", "batch['x'] holds NaNs"; "" if all of `atoms` are finite.
    """
    walk = _Walk(plan, known, atoms, taking_part)
    return next((walk.back_from(atom) for atom in atoms if walk.kind_of(atom) > _Kind.FINITE), "")


class _Walk:
    def __init__(self, plan: Plan, known: Mapping[Var, Any], atoms: Sequence[Atom], taking_part: jax.Array):
        self._plan, self._known, self._taking_part = plan, known, taking_part
        self._producer = plan.graph.producer
        self._kinds: dict[Var, _Kind] = {}
        self._run(atoms)

    def kind_of(self, atom: Atom) -> _Kind:
        return _kind(atom.val) if isinstance(atom, Literal) else self._kinds.get(atom, _Kind.FINITE)

    def _run(self, atoms: Sequence[Atom]) -> None:
        """Find the kinds of all values from which `atoms` are computed. Frees each value after its last use."""
        known = self._known
        reached = self._plan.graph.upstream(atoms, known.__contains__)
        wanted = {id(self._producer[var]) for var in reached if var not in known}
        eqns = [eqn for eqn in self._plan.graph.eqns if id(eqn) in wanted]
        effect = next((eqn for eqn in eqns if has_effects(eqn) or publishes(eqn)), None)
        if effect is not None:
            raise NotImplementedError(f"{_operation(effect)} has an effect, and is not repeated")
        last = {a: n for n, eqn in enumerate(eqns) for a in operands_of(eqn) if isinstance(a, Var)}
        values: dict[Var, Any] = {}

        def value_of(atom: Atom) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            if atom not in values:
                values[atom] = known[atom]
                self._kinds[atom] = _kind(known[atom])
            return values[atom]

        for number, eqn in enumerate(eqns):
            operands = operands_of(eqn)
            values_of = evaluate(eqn, [value_of(a) for a in operands], self._taking_part)
            for var, value in zip(eqn.outvars, values_of, strict=True):
                if var in last:
                    values[var] = value
                self._kinds[var] = _kind(value)
            for atom in operands:
                if isinstance(atom, Var) and last[atom] == number:
                    values.pop(atom, None)
        for atom in atoms:
            if isinstance(atom, Var) and atom not in self._kinds:
                self._kinds[atom] = _kind(known[atom])

    def back_from(self, atom: Atom) -> str:
        """Return a description of the origin of a value that is not finite."""
        kind = self.kind_of(atom)
        place = self._first(atom, kind)
        if not isinstance(place, JaxprEqn):
            return f"{place} holds {_PLURAL[kind]}"
        text = f"the first {_PLURAL[kind]} come from {_operation(place)}"
        infinite = [a for a in operands_of(place) if isinstance(a, Var) and self.kind_of(a) > _Kind.FINITE]
        if infinite:  # a NaN computed from earlier infinities
            before = self._first(infinite[0], _Kind.INFINITE)
            text += f", of infinities {_from(before)}"
        return text

    def _first(self, atom: Atom, kind: _Kind) -> JaxprEqn | str:
        """Return the equation that computed values of a kind from operands without them, or the name of the input that
        has them.
        """
        while isinstance(atom, Var) and atom not in self._known:
            eqn = self._producer[atom]
            earlier = [a for a in operands_of(eqn) if isinstance(a, Var) and self.kind_of(a) >= kind]
            if not earlier:
                return eqn
            atom = earlier[0]
        return self._name(atom)

    def _name(self, atom: Atom) -> str:
        graph = self._plan.graph
        for names, variables in ((graph.batch_names, graph.batch_vars), (graph.state_names, graph.state_vars)):
            if atom in variables:
                return names[variables.index(atom)]
        eqn = self._producer.get(atom) if isinstance(atom, Var) else None
        return "a constant of the driver" if eqn is None else f"{describe(eqn)}{at(line_of(eqn.source_info))}"


def _from(place: JaxprEqn | str) -> str:
    return f"from {_operation(place)}" if isinstance(place, JaxprEqn) else f"in {place}"


def _operation(eqn: JaxprEqn) -> str:
    return f"`{eqn.primitive.name}`{at(line_of(eqn.source_info))}"


def _kind(value: Any) -> _Kind:
    x = value if hasattr(value, "dtype") else np.asarray(value)
    if not jnp.issubdtype(x.dtype, np.inexact):
        return _Kind.FINITE
    x = np.asarray(x)
    return _Kind.NAN if np.isnan(x).any() else _Kind.INFINITE if np.isinf(x).any() else _Kind.FINITE
