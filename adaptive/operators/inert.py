"""Operators without a result: values that leave the graph, and state, take no part in derivatives or in `vmap`."""

from __future__ import annotations

from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from adaptive.base.errors import CollectiveError
from adaptive.base.source_lines import at, current_line


def inert(primitive: Primitive) -> None:
    """Pass the primitive by in `jax.grad`, and refuse it in `jax.vmap`."""
    ad.primitive_jvps[primitive] = _inert_jvp(primitive)
    batching.primitive_batchers[primitive] = _refuse_batch


def _inert_jvp(primitive):
    def jvp(primals, tangents, **params):
        del tangents
        return primitive.bind(*primals, **params), []

    return jvp


def _refuse_batch(operands, dims, **params):
    raise CollectiveError(
        f"a hook or an operator state is mapped by jax.vmap{at(current_line())}. Move it out of the mapped function."
    )
