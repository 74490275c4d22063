"""All uses of undocumented parts of JAX: to support a newer JAX, read this file and run its test.

None of these parts is private (`jax._src`), but JAX does not promise to keep them: the types of a graph, binding
equations again, nested jaxprs, names of effects and primitives, source information.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import DropVar as DropVar
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.extend.core import jaxprs_in_params
from jax.interpreters import mlir

# --- equations --------------------------------------------------------------------------------------------------------


def bind(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    """Apply an equation to other operands. Traces it, or computes it at once if the operands are numbers.

    Args:
      params: replace the equation's own parameters.
    """
    info = eqn.source_info
    with source_info_util.user_context(info.traceback, name_stack=info.name_stack), eqn.ctx.manager:
        chosen = eqn.primitive.get_bind_params(dict(eqn.params if params is None else params))
        results = eqn.primitive.bind(*operands, **chosen)
    return list(results) if eqn.primitive.multiple_results else [results]


def nested(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the jaxprs in an equation's parameters, for instance a loop's body or a jitted function."""
    for found in jaxprs_in_params(eqn.params):
        yield found.jaxpr if isinstance(found, ClosedJaxpr) else found


def nested_equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield the equations nested in an equation, at any depth."""
    for jaxpr in nested(eqn):
        for inner in jaxpr.eqns:
            yield inner
            yield from nested_equations(inner)


def axes_of(eqn: JaxprEqn) -> frozenset[Any]:
    """Return the axis names that an equation binds for the equations nested in it (`jax.shard_map`)."""
    return frozenset(eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ())))


def most_devices(eqn: JaxprEqn) -> int:
    """Return the largest number of devices in a mesh among an equation's parameters; 1 if none."""
    values = [v for param in eqn.params.values() for v in (param if isinstance(param, tuple | list) else (param,))]
    meshes = [v.mesh if isinstance(v, jax.sharding.NamedSharding) else v for v in values]
    return max([1, *(m.size for m in meshes if isinstance(m, jax.sharding.Mesh | jax.sharding.AbstractMesh))])


def closed_within(params: Mapping[str, Any]) -> Iterator[ClosedJaxpr]:
    """Yield the closed jaxprs in an equation's parameters, at any depth."""
    values = [v for param in params.values() for v in (param if isinstance(param, tuple | list) else (param,))]
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value
        jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        for eqn in jaxpr.eqns if isinstance(jaxpr, Jaxpr) else ():
            yield from closed_within(eqn.params)


# --- primitives by name -----------------------------------------------------------------------------------------------

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
}
_CUSTOM_DERIVATIVES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
_CHECKPOINTS = {"checkpoint": "jaxpr", "remat2": "jaxpr"}
_HOLDERS = {
    "scan": "jax.lax.scan (or fori_loop)",
    "while": "jax.lax.while_loop",
    "cond": "jax.lax.cond",
    **dict.fromkeys(_CHECKPOINTS, "jax.checkpoint"),
}

# The results of these don't follow from their operands: they come from the host or from a stateful generator.
_FROM_OUTSIDE = {"pure_callback", "io_callback", "rng_uniform", "infeed", "read_peer"}


def called(eqn: JaxprEqn, *, derivatives: bool = False, checkpoints: bool = False) -> ClosedJaxpr | None:
    """Return the jaxpr of an equation that only calls a function (`jax.jit`); `None` for any other equation.

    Args:
      derivatives: include functions with custom derivatives.
      checkpoints: include functions that are computed again in the backward pass (`jax.checkpoint`).
    """
    names = _CALLS | (_CUSTOM_DERIVATIVES if derivatives else {}) | (_CHECKPOINTS if checkpoints else {})
    found = eqn.params.get(names.get(eqn.primitive.name, ""))
    # Since JAX 0.11 open and closed jaxprs are one class, and an open one has no constants.
    return found if found is None or isinstance(found, ClosedJaxpr) else ClosedJaxpr(found, ())


def holder(eqn: JaxprEqn) -> str:
    """Return the user's name of an equation that contains others: "jax.lax.while_loop"."""
    return _HOLDERS.get(eqn.primitive.name, eqn.primitive.name)


def is_checkpoint(eqn: JaxprEqn) -> bool:
    """Return whether an equation is computed again in the backward pass."""
    return eqn.primitive.name in _CHECKPOINTS


def asks_the_host(eqn: JaxprEqn) -> bool:
    """Return whether a result of an equation depends on more than its operands, for instance on the host."""
    return any(e.primitive.name in _FROM_OUTSIDE for e in (eqn, *nested_equations(eqn)))


# --- effects ----------------------------------------------------------------------------------------------------------


def has_effects(eqn: JaxprEqn) -> bool:
    """Return whether an equation has effects, such as printing. Writes to its own scratch memory don't count."""
    return any(type(effect).__name__ != "InternalMutableArrayEffect" for effect in eqn.effects)


def has_ordered_effects(eqn: JaxprEqn) -> bool:
    """Return whether an equation has effects that must keep their order."""
    return any("Ordered" in type(effect).__name__ for effect in eqn.effects)


def has_references(eqn: JaxprEqn) -> bool:
    """Return whether an equation reads or writes a mutable array."""
    return any(hasattr(v.aval, "inner_aval") for v in (*eqn.invars, *eqn.outvars))


def lower_to_callback(context: Any, function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Any:
    """Lower a primitive to a call of `function`, like `jax.pure_callback` but without its copies.

    The function receives its operands as numpy views, which it must neither write nor keep. Its results are copied.
    """
    results, _, _ = mlir.emit_python_callback(
        context,
        function,
        None,
        list(operands),
        context.avals_in,
        context.avals_out,
        has_side_effect=True,
        returns_token=False,
    )
    return results


# --- source information -----------------------------------------------------------------------------------------------


def frames_of(source_info: Any) -> list[str]:
    """Return the Python frames that created an equation, "file.py:15:4 (function)", the innermost last."""
    return source_info_util.summarize(source_info, num_frames=64).splitlines()


def current_source() -> Any:
    """Return the `source_info` that an equation created here would have."""
    return source_info_util.current()


# JAX caches the trace of a nested jax.jit by its argument shapes. A helper that derives shapes from the microbatch
# size, which is not an argument, would get the shapes of an earlier trace. A user context is part of JAX's cache key
# and avoids that. Its value is new for each trace, not for each size, since a cached trace would hide the helper's
# operators.
_trace_cache_key = jax.make_user_context(default_value=0)
_traces = itertools.count(1)


def traced_anew() -> AbstractContextManager[Any]:
    """Return a context in which JAX uses none of its cached traces."""
    return _trace_cache_key(next(_traces))
