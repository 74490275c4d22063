"""JAX's less documented corners, all of them: whoever moves to a newer JAX reads this file, and runs its test.

None of it is private (`jax._src`), and none of it is promised: how equations are bound again, what nests in them, what
their effects and primitives are called, where they come from, how a compiled program is named.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.extend import source_info_util
from jax.extend.backend import get_compile_options
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params
from jax.interpreters import mlir

# --- equations --------------------------------------------------------------------------------------------------------


def bind(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    """An equation's results on other operands: traced, or computed at once where those are numbers.

    Args:
      params: in the place of its own.
    """
    info = eqn.source_info
    with source_info_util.user_context(info.traceback, name_stack=info.name_stack), eqn.ctx.manager:
        chosen = eqn.primitive.get_bind_params(dict(eqn.params if params is None else params))
        results = eqn.primitive.bind(*operands, **chosen)
    return list(results) if eqn.primitive.multiple_results else [results]


def nested(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs in an equation's parameters: a loop's body, a jitted function."""
    for found in jaxprs_in_params(eqn.params):
        yield found.jaxpr if isinstance(found, ClosedJaxpr) else found


def nested_equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equations within an equation, however deep."""
    for jaxpr in nested(eqn):
        for inner in jaxpr.eqns:
            yield inner
            yield from nested_equations(inner)


def axes_of(eqn: JaxprEqn) -> frozenset[Any]:
    """Names of axes that the equations nested in this one have from it (`jax.shard_map`), whatever those outside mean
    by them.
    """
    return frozenset(eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ())))


def closed_within(params: Mapping[str, Any]) -> Iterator[ClosedJaxpr]:
    """Jaxprs in parameters with what they close over, however deep."""
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

# What these bring is not computed from their operands: it comes from the host, or from a generator with a state.
_FROM_OUTSIDE = {"pure_callback", "io_callback", "rng_uniform", "infeed", "read_peer"}


def called(eqn: JaxprEqn, *, derivatives: bool = False, checkpoints: bool = False) -> ClosedJaxpr | None:
    """The function that an equation does nothing but call (`jax.jit`), as a jaxpr; else `None`.

    Args:
      derivatives, checkpoints: whether what has derivatives of its own, or is computed again in the backward pass, is
        nothing but called, too.
    """
    names = _CALLS | (_CUSTOM_DERIVATIVES if derivatives else {}) | (_CHECKPOINTS if checkpoints else {})
    found = eqn.params.get(names.get(eqn.primitive.name, ""))
    # Since JAX 0.11 the two are one class, and an open jaxpr is closed over nothing.
    return found if found is None or isinstance(found, ClosedJaxpr) else ClosedJaxpr(found, ())


def holder(eqn: JaxprEqn) -> str:
    """What a user calls an equation in which others are nested."""
    return _HOLDERS.get(eqn.primitive.name, eqn.primitive.name)


def is_checkpoint(eqn: JaxprEqn) -> bool:
    """Whether an equation is computed again in the backward pass."""
    return eqn.primitive.name in _CHECKPOINTS


def asks_the_host(eqn: JaxprEqn) -> bool:
    """Whether anything in an equation comes from elsewhere than its operands."""
    return any(e.primitive.name in _FROM_OUTSIDE for e in (eqn, *nested_equations(eqn)))


# --- effects ----------------------------------------------------------------------------------------------------------


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does something beside its results, such as printing. Writing its own scratch is nothing."""
    return any(type(effect).__name__ != "InternalMutableArrayEffect" for effect in eqn.effects)


def has_ordered_effects(eqn: JaxprEqn) -> bool:
    """Whether what an equation does beside its results must keep its place among its like."""
    return any("Ordered" in type(effect).__name__ for effect in eqn.effects)


def has_references(eqn: JaxprEqn) -> bool:
    """Whether an equation reads or writes a mutable array."""
    return any(hasattr(v.aval, "inner_aval") for v in (*eqn.invars, *eqn.outvars))


def lower_to_callback(context: Any, function: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> Any:
    """A primitive's lowering by which `function` is called with its operands, as views of numpy's that are not to be
    written and not to be kept; what it returns is copied. (What `jax.pure_callback` does, without its copies.)
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


# --- where things come from -------------------------------------------------------------------------------------------


def frames_of(source_info: Any) -> list[str]:
    """The lines of Python that an equation stems from, "file.py:15:4 (function)", the innermost last."""
    return source_info_util.summarize(source_info, num_frames=64).splitlines()


def current_source() -> Any:
    """What `source_info` an equation made here and now would have."""
    return source_info_util.current()


# JAX keeps the trace of a nested jax.jit by the shapes that it is called with. What a driver is traced for is no
# argument, so a helper that makes shapes of it would be given those of another trace; a context makes JAX tell them
# apart. One per trace, and not per numbers: an operator that JAX leaves out would be missed in the first trace alone.
_trace_cache_key = jax.make_user_context(default_value=0)
_traces = itertools.count(1)


def traced_anew() -> AbstractContextManager[Any]:
    """A context in which no trace that JAX has kept is taken for one of now."""
    return _trace_cache_key(next(_traces))


# --- compiled programs ------------------------------------------------------------------------------------------------


def text_of(lowered: Any) -> str:
    """What a lowered program says, but for its name."""
    return lowered.as_text().split(maxsplit=2)[2]  # behind "module @name"


def calls_back(text: str) -> bool:
    """Whether a lowered program calls Python: which function is not said in its text."""
    return "callback" in text


def give_name(lowered: Any, name: str) -> None:
    """Call a lowered program something else. And keep to this thread: JAX's pool of threads for lowered programs is
    Python's, which may end before XLA has."""
    module = lowered.compiler_ir()
    names = module.operation.attributes
    names["sym_name"] = type(names["sym_name"]).get(name, module.context)
    module.context.enable_multithreading(False)


def names_of(compiled: Any) -> list[str]:
    """What a compiled program's modules are called."""
    return [module.name for module in compiled.runtime_executable().hlo_modules()]


_CODE = (b"\x7fELF", b"\xcf\xfa\xed\xfe")  # what object files begin with, on Linux and macOS


def loaded_on(compiled: jax.stages.Compiled, device: jax.Device) -> jax.stages.Compiled:
    """A program that was compiled here for one CPU device, as it is, loaded on another one.

    Raises:
      Exception: of any kind, where it cannot be.
    """
    payload, in_tree, out_tree = serialize_executable.serialize(compiled)
    if not any(mark in payload for mark in _CODE):  # XLA would load it, and find its functions missing when it is run
        raise ValueError("the program comes from the compilation cache; of such XLA does not keep the code")
    executable, arguments, no_keywords = _Loader(io.BytesIO(payload), device).load()
    described = in_tree.unflatten(arguments)
    return jax.stages.Compiled(executable.load(), [], described, out_tree, no_kwargs=no_keywords)


class _Loader(pickle.Unpickler):
    """JAX's own loader takes a program back to the device it was compiled for."""

    def __init__(self, file: io.BytesIO, device: jax.Device):
        super().__init__(file)
        self._device = device

    def persistent_load(self, name: Any) -> Any:
        kind, client = name[0], self._device.client
        if kind == "exec":
            options = get_compile_options(1, 1, device_assignment=np.array([[self._device.id]]))
            return client.deserialize_executable(name[1], executable_devices=[self._device], compile_options=options)
        return self._device if kind == "device" else client
