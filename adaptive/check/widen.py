"""A driver's mathematics in single precision: what it computes in half precisions, computed in single.

A half precision rounds each sum over examples to two or three digits, and a mean over three examples otherwise than
one over four. Whether a step depends on how its batch is split is a question about its mathematics, which such rounding
would hide. So `check` asks it of this driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from adaptive.base.jaxprs import bind, called
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.graph.trace import Atom
from adaptive.operators.context import tracing
from adaptive.operators.slots import Frozen
from adaptive.runtime.calls import Plans

from .influence import dtypes_of

SINGLE = np.dtype(np.float32)
_BY_BITS = ("bitcast_convert_type", "nextafter")  # what they do is of the dtype itself
_PRECISE = ("dot_general", "conv_general_dilated")


def is_half(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and np.dtype(dtype).itemsize < SINGLE.itemsize


def must_widen(plan: Plan, device: jax.Device) -> bool:
    """Whether anything is computed in less than single precision: said so by the driver, or taken so by the device,
    which may round what it multiplies.
    """
    values = {v.aval.dtype for v in (*plan.graph.invars, *plan.graph.consts)}
    return device.platform != "cpu" or any(map(is_half, values | dtypes_of(plan.graph.eqns)))


def widened(plans: Plans) -> Planner:
    """The plans of the same driver, with half precisions replaced by single, and products at their full precision."""
    plan, graph = plans.reference, plans.reference.graph

    def driver(state: list[Any], batch: list[Any]) -> tuple[list[Any], list[Any]]:
        narrow, current = plans(len(batch[0])).graph, tracing()
        assert current is not None
        current.minibatches.extend(narrow.minibatches)
        env: dict[Var, Any] = dict(zip(narrow.invars, [*state, *batch], strict=True))
        env.update((var, wide(value)) for var, value in narrow.consts.items())
        _evaluate(narrow.eqns, env)
        results = [_value(env, a) for a in narrow.outvars]
        return results[: len(state)], results[len(state) :]

    driver.__name__ = graph.name
    planner = Planner(
        driver,
        [_wide_shape(v.aval) for v in graph.state_vars],
        lambda examples: [_wide_shape(v.aval, examples) for v in graph.batch_vars],
        capacity=graph.capacity,
        local_state=plan.local_state,
    )
    found = planner.begin(graph.examples)
    names = {key: getattr(graph, key) for key in ("state_names", "batch_names", "metric_names", "metrics_tree")}
    planner.reference = replace(found, graph=replace(found.graph, **names))
    return planner


def wide(value: Any) -> Any:
    """An array or number, in single precision if it is of less."""
    return value.astype(SINGLE) if is_half(getattr(value, "dtype", bool)) else value


def _wide_shape(aval: Any, examples: int | None = None) -> jax.ShapeDtypeStruct:
    shape = aval.shape if examples is None else (examples, *aval.shape[1:])
    return jax.ShapeDtypeStruct(shape, SINGLE if is_half(aval.dtype) else aval.dtype)


def _value(env: dict[Var, Any], atom: Atom) -> Any:
    if isinstance(atom, Literal):
        return wide(np.asarray(atom.val)) if is_half(atom.aval.dtype) else atom.val
    return env[atom]


def _evaluate(eqns: Sequence[JaxprEqn], env: dict[Var, Any]) -> None:
    for eqn in eqns:
        env.update(zip(eqn.outvars, _results(eqn, [_value(env, a) for a in eqn.invars]), strict=True))


def _results(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if name == "reduce_precision":
        return operands
    function = called(eqn, derivatives=True, checkpoints=True)
    if function is not None:
        return _inlined(function, operands)
    if name not in _BY_BITS:
        params = {key: _wide_parameter(value) for key, value in eqn.params.items()}
        if name in _PRECISE:
            params["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
        try:
            results = bind(eqn, operands, params)
        except Exception:  # a primitive that is made for its dtypes: done in them
            results = None
        if results is not None and all(map(_is_as_meant, results, eqn.outvars)):
            return results
    narrow = [_narrowed(x, a) for x, a in zip(operands, eqn.invars, strict=True)]
    return [wide(x) for x in bind(eqn, narrow)]


def _is_as_meant(result: Any, var: Var) -> bool:
    shape = jnp.shape(result)
    return not hasattr(var.aval, "shape") or (shape, result.dtype) == (var.aval.shape, _wide_shape(var.aval).dtype)


def _narrowed(value: Any, atom: Atom) -> Any:
    dtype = getattr(atom.aval, "dtype", bool)
    return jnp.asarray(value).astype(dtype) if is_half(dtype) else value


def _inlined(nested: ClosedJaxpr | Jaxpr, operands: Sequence[Any]) -> list[Any]:
    jaxpr, consts = (nested.jaxpr, nested.consts) if isinstance(nested, ClosedJaxpr) else (nested, ())
    env: dict[Var, Any] = dict(zip(jaxpr.invars, operands, strict=True))
    env.update(zip(jaxpr.constvars, map(wide, consts), strict=True))
    _evaluate(jaxpr.eqns, env)
    return [_value(env, a) for a in jaxpr.outvars]


def _wide_parameter(value: Any) -> Any:
    match value:
        case ClosedJaxpr():
            return jax.make_jaxpr(lambda *a: _inlined(value, a))(*(_wide_shape(v.aval) for v in value.jaxpr.invars))
        case Jaxpr() if not value.constvars:
            return jax.make_jaxpr(lambda *a: _inlined(value, a))(*(_wide_shape(v.aval) for v in value.invars)).jaxpr
        case tuple() if any(isinstance(v, ClosedJaxpr) for v in value):
            return tuple(map(_wide_parameter, value))
        case Frozen():
            return Frozen([wide(leaf) for leaf in value.leaves])
        case np.dtype() if is_half(value):
            return SINGLE
    return value
