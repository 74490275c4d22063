"""Checks that what a monitor is given as a mean is the mean of what it is given beside it (`assert_mean`).

In a single microbatch of one worker, the mean of a gradient over all examples is that gradient. So both values are
computed for one microbatch, with collectives that return their operand, and compared. They differ if a driver passes
the gradient of another batch, of part of the batch, of other parameters, or one that was clipped on one side only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from adaptive.base.jaxprs import asks_the_host, bind, has_effects
from adaptive.base.source_lines import at, line_of
from adaptive.graph.plan import Plan
from adaptive.graph.trace import Atom, operands_of
from adaptive.operators.collectives import collective_p
from adaptive.operators.operator_state import state_read_p
from adaptive.operators.replication_claims import assert_scope_p
from adaptive.operators.sources import Reading, source_p

_TOLERANCE = 0.02  # relative to the norm of the local value; half precision rounds by 0.004
_UNKNOWN = object()  # the value of what cannot be computed for one worker alone


def wrong_means(plan: Plan, state: Sequence[Any], batch: Sequence[Any], reading: Reading) -> dict[str, float]:
    """Return the monitors whose mean is not that of the value beside it, with the relative difference.

    Pairs that depend on the host, or on collectives other than sums and means, are left out.

    Args:
      state: leaves of the state.
      batch: leaves of at least as many examples as the plan's microbatches have.
      reading: what sources read.
    """
    pairs = list(_pairs(plan))
    if not pairs:
        return {}
    graph = plan.graph
    rows = [np.asarray(leaf)[: graph.examples] for leaf in batch]
    values = dict(zip(graph.invars, [*state, *rows], strict=True)) | dict(graph.consts)
    for eqn in _needed(graph.eqns, {atom for pair in pairs for side in pair for atom in side.invars}):
        values.update(zip(eqn.outvars, _results(eqn, values, reading), strict=True))
    found: dict[str, float] = {}
    for local, mean in pairs:
        name = f"{local.params['what']}{at(line_of(local.source_info))}"
        sides = [[_value(values, atom) for atom in side.invars] for side in (local, mean)]
        difference = _difference(*sides)
        if difference > _TOLERANCE:
            found[name] = max(difference, found.get(name, 0.0))
    return found


def _pairs(plan: Plan) -> Iterator[tuple[JaxprEqn, JaxprEqn]]:
    claims = [e for e in plan.graph.eqns if e.primitive is assert_scope_p and e.params["paired"]]
    for first, second in pairwise(claims):
        if first.params["scope"] == "reduced" and second.params["scope"] == "independent":
            yield second, first


def _needed(eqns: Sequence[JaxprEqn], wanted: set[Atom]) -> list[JaxprEqn]:
    """Return the equations that the wanted values are computed from, in their order."""
    found = []
    for eqn in reversed(eqns):
        if any(var in wanted for var in eqn.outvars):
            found.append(eqn)
            wanted.update(a for a in operands_of(eqn) if isinstance(a, Var))
    return found[::-1]


def _value(values: dict[Var, Any], atom: Atom) -> Any:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _results(eqn: JaxprEqn, values: dict[Var, Any], reading: Reading) -> list[Any]:
    if eqn.primitive is source_p:
        source = eqn.params["source"]
        return [jnp.asarray(source.read(reading), source.dtype)]
    if eqn.primitive is state_read_p:
        return [jnp.int32(0), *map(jnp.asarray, eqn.params["init"].leaves)]
    operands = [_value(values, atom) for atom in operands_of(eqn)]
    if any(operand is _UNKNOWN for operand in operands) or asks_the_host(eqn) or has_effects(eqn):
        return [_UNKNOWN] * len(eqn.outvars)
    if eqn.primitive is assert_scope_p:
        return operands
    if eqn.primitive is collective_p:
        how = eqn.params["how"]
        same = how.reduces and how.op == "sum" and not eqn.params["gated"]
        return operands if same else [_UNKNOWN] * len(eqn.outvars)
    return bind(eqn, operands)


def _difference(local: Sequence[Any], mean: Sequence[Any]) -> float:
    """Return the norm of the difference over that of the local value; 0 if a value is unknown or not finite."""
    if any(value is _UNKNOWN for value in (*local, *mean)):
        return 0.0
    own, averaged = (np.concatenate([np.asarray(v).astype(np.complex128).ravel() for v in x]) for x in (local, mean))
    scale = max(float(np.linalg.norm(own)), float(np.linalg.norm(averaged)))
    difference = float(np.linalg.norm(own - averaged))
    return difference / scale if 0 < scale < np.inf else 0.0
