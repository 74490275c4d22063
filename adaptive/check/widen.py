"""A driver's computation in higher precision: single or half precision is replaced by double.

Rounding can hide whether a step depends on the split of its batch: half precision rounds each sum over examples to two
or three digits, and in single precision an element of 1 is lost in a sum with 1e7. In double precision, rounding errors
are far below any difference that shows in the driver's own precision. If double precision is not possible, half
precision is replaced by single.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from adaptive.base.jaxprs import asks_the_host, bind, called, has_effects
from adaptive.graph.plan import Plan
from adaptive.graph.planner import Planner
from adaptive.graph.trace import Atom, Graph
from adaptive.operators.context import tracing
from adaptive.operators.operator_state import Frozen
from adaptive.runtime.microbatch_segments import Plans

from .influence import dtypes_of

SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
# Primitives that depend on their dtype: they read its bits, or were compiled for it.
_BY_BITS = ("bitcast_convert_type", "nextafter", "ffi_call", "pallas_call", "triton_kernel_call", "tpu_custom_call")
_PRECISE = ("dot_general", "conv_general_dilated")


class CannotWidenError(Exception):
    """Raised if part of a driver cannot be computed in another precision than its own."""


@dataclass(frozen=True)
class Width:
    """A precision: values of lower precision are converted to it.

    Attributes:
      real: `SINGLE` or `DOUBLE`. All work in double precision needs JAX's `enable_x64` (`settings`).
    """

    real: np.dtype

    def is_narrow(self, dtype: Any) -> bool:
        """Return whether a dtype is floating point, real or complex, of lower precision than this one."""
        if jnp.issubdtype(dtype, jnp.floating):
            return np.dtype(dtype).itemsize < self.real.itemsize
        return bool(jnp.issubdtype(dtype, jnp.complexfloating)) and np.dtype(dtype).itemsize < 2 * self.real.itemsize

    def of(self, dtype: Any) -> Any:
        """Return the dtype that replaces a dtype."""
        if not self.is_narrow(dtype):
            return dtype
        return np.dtype(np.complex128) if jnp.issubdtype(dtype, jnp.complexfloating) else self.real

    def wide(self, value: Any) -> Any:
        """Convert an array or number to this precision if its own is lower."""
        dtype = getattr(value, "dtype", bool)
        return value.astype(self.of(dtype)) if self.is_narrow(dtype) else value

    def shape(self, aval: Any, examples: int | None = None) -> jax.ShapeDtypeStruct:
        """Return a value's shape and dtype, for a given number of examples."""
        shape = aval.shape if examples is None else (examples, *aval.shape[1:])
        return jax.ShapeDtypeStruct(shape, self.of(aval.dtype))

    def settings(self) -> AbstractContextManager[Any]:
        """Return JAX's settings for work in this precision, as a context manager."""
        return jax.enable_x64(True) if self.real == DOUBLE else nullcontext()


def widths_for(plan: Plan, device: jax.Device) -> list[Width | None]:
    """Return the precisions in which to compute a driver, the best first; `None` is its own."""
    values = {v.aval.dtype for v in (*plan.graph.invars, *plan.graph.consts)} | dtypes_of(plan.graph.eqns)
    double, single = Width(DOUBLE), Width(SINGLE)
    # Devices may use lower precision in matrix products, even of single precision.
    own: list[Width | None] = [single] if device.platform != "cpu" or any(map(single.is_narrow, values)) else [None]
    return [double, *own] if any(map(double.is_narrow, values)) and device.platform != "tpu" else own


def widened(plans: Plans, width: Width) -> Planner:
    """Return the driver's plans in the given precision, with matrix products at full precision.

    Raises:
      CannotWidenError: the driver has a primitive that works only in its own dtypes, and `width` is double precision.
    """
    plan, graph = plans.reference, plans.reference.graph
    evaluation = Evaluation(width)
    graphs: dict[int, Graph] = {}

    def batch_of(examples: int) -> list[jax.ShapeDtypeStruct]:
        # Traced outside any other trace, so that its constants stay numbers.
        graphs[examples] = plans(examples).graph
        return [width.shape(v.aval, examples) for v in graph.batch_vars]

    def driver(state: list[Any], batch: list[Any]) -> tuple[list[Any], list[Any]]:
        narrow, current = graphs[len(batch[0])], tracing()
        assert current is not None
        current.minibatches.extend(narrow.minibatches)
        results = evaluation.of(
            narrow.eqns, narrow.outvars, dict(zip(narrow.invars, [*state, *batch], strict=True)), narrow.consts
        )
        return results[: len(state)], results[len(state) :]

    driver.__name__ = graph.name
    planner = Planner(
        driver,
        [width.shape(v.aval) for v in graph.state_vars],
        batch_of,
        capacity=graph.capacity,
        local_state=plan.local_state,
        functions_checked=True,  # by the driver's own planner; traces here reuse the same functions
    )
    found = planner.begin(graph.examples)
    names = {key: getattr(graph, key) for key in ("state_names", "batch_names", "metric_names", "metrics_tree")}
    planner.reference = replace(found, graph=replace(found.graph, **names))
    return planner


class Evaluation:
    """Evaluator of equations in a higher precision than they are written in."""

    def __init__(self, width: Width):
        self._width = width

    def of(
        self, eqns: Sequence[JaxprEqn], results: Sequence[Atom], env: dict[Var, Any], consts: Mapping[Var, Any]
    ) -> list[Any]:
        """Compute the values of `results` from inputs `env` that already have this precision."""
        env.update((var, self._width.wide(value)) for var, value in consts.items())
        for eqn in eqns:
            env.update(zip(eqn.outvars, self._results(eqn, [self._value(env, a) for a in eqn.invars]), strict=True))
        return [self._value(env, a) for a in results]

    def _value(self, env: dict[Var, Any], atom: Atom) -> Any:
        if not isinstance(atom, Literal):
            return env[atom]
        # With 64 bits enabled, a Python number would have another dtype.
        is_plain = jnp.issubdtype(atom.aval.dtype, np.number) or atom.aval.dtype == np.bool_
        return self._width.wide(np.asarray(atom.val, atom.aval.dtype)) if is_plain else atom.val

    def _results(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "reduce_precision":
            return operands
        function = called(eqn, derivatives=True, checkpoints=True)
        if function is not None:
            return self.inlined(function, operands)
        as_it_is = name in _BY_BITS or asks_the_host(eqn) or has_effects(eqn)
        if not as_it_is:
            params = {key: self._parameter(value) for key, value in eqn.params.items()}
            if name in _PRECISE:
                params["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
            try:
                results = bind(eqn, operands, params)
            except CannotWidenError:
                raise
            except Exception:  # a primitive that works only in its own dtypes: computed in them
                results = None
            if results is not None and all(map(self._is_as_meant, results, eqn.outvars)):
                return results
        narrow = [self._narrowed(x, a) for x, a in zip(operands, eqn.invars, strict=True)]
        rounds = any(n is not x for n, x in zip(narrow, operands, strict=True))
        if self._width.real == DOUBLE and rounds and eqn.outvars and not asks_the_host(eqn):
            raise CannotWidenError(name)
        return [self._width.wide(x) for x in bind(eqn, narrow)]

    def _is_as_meant(self, result: Any, var: Var) -> bool:
        meant = var.aval
        return not hasattr(meant, "shape") or (jnp.shape(result), result.dtype) == (
            meant.shape,
            self._width.of(meant.dtype),
        )

    def _narrowed(self, value: Any, atom: Atom) -> Any:
        dtype = getattr(atom.aval, "dtype", bool)
        return jnp.asarray(value).astype(dtype) if self._width.is_narrow(dtype) else value

    def inlined(self, nested: ClosedJaxpr | Jaxpr, operands: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr on operands in this precision."""
        jaxpr, consts = (nested.jaxpr, nested.consts) if isinstance(nested, ClosedJaxpr) else (nested, ())
        env = dict(zip(jaxpr.invars, operands, strict=True))
        return self.of(jaxpr.eqns, jaxpr.outvars, env, dict(zip(jaxpr.constvars, consts, strict=True)))

    def _parameter(self, value: Any) -> Any:
        match value:
            case ClosedJaxpr():
                shapes = map(self._width.shape, (v.aval for v in value.jaxpr.invars))
                return jax.make_jaxpr(lambda *a: self.inlined(value, a))(*shapes)
            case Jaxpr() if not value.constvars:
                shapes = map(self._width.shape, (v.aval for v in value.invars))
                return jax.make_jaxpr(lambda *a: self.inlined(value, a))(*shapes).jaxpr
            case tuple() if any(isinstance(v, ClosedJaxpr) for v in value):
                return tuple(map(self._parameter, value))
            case Frozen():
                return Frozen([self._width.wide(leaf) for leaf in value.leaves])
            case np.dtype() if self._width.is_narrow(value):
                return self._width.of(value)
        return value
