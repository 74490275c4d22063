"""Rules for operators without a result: `jax.grad` ignores them, and `jax.vmap` refuses them."""

from __future__ import annotations

from jax.interpreters import ad, batching

from adaptive.base.errors import CollectiveError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.jaxprs import Primitive


def no_result(primitive: Primitive) -> None:
    """Register rules for a primitive without results: ignored by `jax.grad`, refused by `jax.vmap`."""
    ad.primitive_jvps[primitive] = _no_result_jvp(primitive)
    batching.primitive_batchers[primitive] = _refuse_batch


def _no_result_jvp(primitive):
    def jvp(primals, tangents, **params):
        del tangents
        return primitive.bind(*primals, **params), []

    return jvp


def _refuse_batch(operands, dims, **params):
    raise CollectiveError(
        f"a hook or an operator state is mapped by jax.vmap{at(current_line())}. Move it out of the mapped function."
    )
