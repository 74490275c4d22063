"""A driver's computation in double precision instead of single or half.

Rounding can hide whether a step depends on the split of its batch: half precision rounds each sum over examples to two
or three digits, and in single precision an element of 1 is lost in a sum with 1e7. In double precision, rounding errors
are far below any difference that shows in the driver's own precision. Work in it needs JAX's `enable_x64`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.values.jaxprs import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    asks_the_host,
    bind,
    called,
    has_effects,
)
from adaptive.graph.planner import Planner
from adaptive.graph.trace import Atom, Graph
from adaptive.operators.axis import ExampleMean
from adaptive.operators.collectives import collective, collective_p
from adaptive.operators.context import tracing
from adaptive.operators.operator_state import Frozen
from adaptive.operators.replication_claims import assert_scope, assert_scope_p
from adaptive.operators.sources import EXAMPLES, read

# Primitives that depend on their dtype: they read its bits, or were compiled for it.
_BY_BITS = ("bitcast_convert_type", "nextafter", "ffi_call", "pallas_call", "triton_kernel_call", "tpu_custom_call")
_PRECISE = ("dot_general", "conv_general_dilated")


class CannotWidenError(Exception):
    """Raised if part of a driver cannot be computed in double precision. The message is the primitive's name."""


def is_narrow(dtype: Any) -> bool:
    """Return whether a dtype is floating point, real or complex, of lower precision than double."""
    return bool(jnp.issubdtype(dtype, jnp.inexact)) and np.dtype(dtype).itemsize < wide_dtype(dtype).itemsize


def wide_dtype(dtype: Any) -> Any:
    """Return the dtype that replaces a dtype."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype


def wide(value: Any) -> Any:
    """Convert an array or number to double precision if its own is lower."""
    dtype = getattr(value, "dtype", bool)
    return value.astype(wide_dtype(dtype)) if is_narrow(dtype) else value


def wide_shape(aval: Any, examples: int | None = None) -> jax.ShapeDtypeStruct:
    """Return a value's shape and dtype, for a given number of examples."""
    shape = aval.shape if examples is None else (examples, *aval.shape[1:])
    return jax.ShapeDtypeStruct(shape, wide_dtype(aval.dtype))


def widened(plans: Planner) -> Planner:
    """Return the driver's plans in double precision, with matrix products at full precision.

    The driver has more metrics: the `results_of_collectives`, of those that differ between workers one worker's; and
    for each pair of `paired`, the relative difference between both sides, of which the local one is averaged over all
    examples; NaN if both are 0.

    Raises:
      CannotWidenError: the driver has a primitive that works only in its own dtypes.
    """
    plan, graph = plans.reference, plans.reference.graph
    graphs: dict[int, Graph] = {}

    def batch_of(examples: int) -> list[jax.ShapeDtypeStruct]:
        # Traced outside any other trace, so that its constants stay numbers.
        graphs[examples] = plans(examples).graph
        return [wide_shape(v.aval, examples) for v in graph.batch_vars]

    def driver(state: list[Any], batch: list[Any]) -> tuple[list[Any], list[Any]]:
        narrow, current = graphs[len(batch[0])], tracing()
        assert current is not None
        current.minibatches.extend(narrow.minibatches)
        given = dict(zip(narrow.invars, [*state, *batch], strict=True))
        pairs = paired(narrow)
        sides = [a for pair in pairs for side in pair for a in side.invars]
        wanted = [*narrow.outvars, *sides, *results_of_collectives(narrow)]
        results = iter(evaluated(narrow.eqns, wanted, given, narrow.consts))
        new_state, metrics = ([next(results) for _ in part] for part in (narrow.new_state, narrow.metrics))
        gaps = [_gap(*([next(results) for _ in side.invars] for side in pair)) for pair in pairs]
        return new_state, [*metrics, *assert_scope("replicated", [*results], "check"), *gaps]

    driver.__name__ = graph.name
    planner = Planner(
        driver,
        [wide_shape(v.aval) for v in graph.state_vars],
        batch_of,
        capacity=graph.capacity,
        local_state=plan.local_state,
        on_mesh=True,  # shardings, if the driver has any, were accepted before
        functions_checked=True,  # by the driver's own planner; traces here reuse the same functions
    )
    found = planner.begin(graph.examples)
    names = {key: getattr(graph, key) for key in ("state_names", "batch_names", "metric_names")}
    planner.reference = replace(found, graph=replace(found.graph, **names))
    return planner


def results_of_collectives(graph: Graph) -> list[Var]:
    """Return the results of a driver's collectives, in the order of their equations."""
    return [var for eqn in graph.eqns if eqn.primitive is collective_p for var in eqn.outvars]


def paired(graph: Graph) -> list[tuple[JaxprEqn, JaxprEqn]]:
    """Return the claims of `assert_mean`: for each, the equations of the local value and of what is to be its mean."""
    claims = [e for e in graph.eqns if e.primitive is assert_scope_p and e.params["paired"]]
    kinds = [e.params["scope"] for e in claims]
    return [
        (claims[i + 1], claims[i]) for i in range(len(claims) - 1) if kinds[i : i + 2] == ["reduced", "independent"]
    ]


def _gap(local: list[Any], mean: list[Any]) -> Any:
    averaged = collective(ExampleMean(), local, weight=read(EXAMPLES))
    apart = [a - b for a, b in zip(averaged, mean, strict=True)]
    gap, own, other = (jnp.sqrt(sum(jnp.sum(jnp.abs(x) ** 2) for x in leaves)) for leaves in (apart, averaged, mean))
    return gap / jnp.maximum(own, other)


def evaluated(
    eqns: Sequence[JaxprEqn], results: Sequence[Atom], env: dict[Var, Any], consts: Mapping[Var, Any]
) -> list[Any]:
    """Compute the values of `results` in double precision, from inputs `env` that already have it."""
    env.update((var, wide(value)) for var, value in consts.items())
    for eqn in eqns:
        env.update(zip(eqn.outvars, _results(eqn, [_value(env, a) for a in eqn.invars]), strict=True))
    return [_value(env, a) for a in results]


def inlined(nested: ClosedJaxpr | Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr on operands in double precision."""
    jaxpr, consts = (nested.jaxpr, nested.consts) if isinstance(nested, ClosedJaxpr) else (nested, ())
    env = dict(zip(jaxpr.invars, operands, strict=True))
    return evaluated(jaxpr.eqns, jaxpr.outvars, env, dict(zip(jaxpr.constvars, consts, strict=True)))


def _value(env: dict[Var, Any], atom: Atom) -> Any:
    if not isinstance(atom, Literal):
        return env[atom]
    # With 64 bits enabled, a Python number would have another dtype.
    is_plain = jnp.issubdtype(atom.aval.dtype, np.number) or atom.aval.dtype == np.bool_
    return wide(np.asarray(atom.val, atom.aval.dtype)) if is_plain else atom.val


def _results(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name == "reduce_precision":
        return operands
    if has_effects(eqn) and not eqn.outvars:  # a print or a logger, which must not hear of trials
        return []
    function = called(eqn, derivatives=True, checkpoints=True)
    if function is not None:
        return inlined(function, operands)
    if name not in _BY_BITS and not asks_the_host(eqn) and not has_effects(eqn):
        params = {key: _parameter(value) for key, value in eqn.params.items()}
        if name in _PRECISE:
            params["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
        try:
            results = bind(eqn, operands, params)
        except CannotWidenError:
            raise
        except Exception:  # a primitive that works only in its own dtypes: computed in them
            results = None
        if results is not None and all(map(_is_as_meant, results, eqn.outvars)):
            return results
    narrow = [_narrowed(x, a) for x, a in zip(operands, eqn.invars, strict=True)]
    rounds = any(n is not x for n, x in zip(narrow, operands, strict=True))
    if rounds and eqn.outvars and not asks_the_host(eqn):
        raise CannotWidenError(name)
    return [wide(x) for x in bind(eqn, narrow)]


def _is_as_meant(result: Any, var: Var) -> bool:
    meant = var.aval
    return not hasattr(meant, "shape") or (jnp.shape(result), result.dtype) == (meant.shape, wide_dtype(meant.dtype))


def _narrowed(value: Any, atom: Atom) -> Any:
    dtype = getattr(atom.aval, "dtype", bool)
    return jnp.asarray(value).astype(dtype) if is_narrow(dtype) else value


def _parameter(value: Any) -> Any:
    match value:
        case ClosedJaxpr():
            return jax.make_jaxpr(lambda *a: inlined(value, a))(*(wide_shape(v.aval) for v in value.jaxpr.invars))
        case Jaxpr() if not value.constvars:
            return _parameter(ClosedJaxpr(value, ())).jaxpr
        case tuple() if any(isinstance(v, ClosedJaxpr) for v in value):
            return tuple(map(_parameter, value))
        case Frozen():
            return Frozen([wide(leaf) for leaf in value.leaves])
        case np.dtype() if is_narrow(value):
            return wide_dtype(value)
    return value
