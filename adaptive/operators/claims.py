"""Claims: how widely a value is the same, where the graph cannot tell, or must not be otherwise."""

from __future__ import annotations

from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .context import only_in_programs

T = TypeVar("T")

claim_p = Primitive("claim")  # *values -> *values
claim_p.multiple_results = True
only_in_programs(claim_p)
claim_p.def_abstract_eval(lambda *operands, claim, what: list(operands))
claim_p.def_impl(lambda *operands, claim, what: list(operands))


def claim(claim: Literal["replicated", "local", "reduced"], tree: T, what: str) -> T:
    """Values as they are, with a claim on how widely they are the same.

    Args:
      claim: "replicated": the user vouches that values which the graph takes for a worker's own (what a callback brings
        from the host) are equal on all workers. "local": at least one leaf must differ between workers; a driver in
        which all are replicated is refused.
      what: who claims it, for errors.
    """
    leaves, tree_of = jax.tree.flatten(tree)
    if not leaves:
        return tree
    return jax.tree.unflatten(tree_of, claim_p.bind(*map(jnp.asarray, leaves), claim=claim, what=what))


def _claim_jvp(primals, tangents, **params):
    dense = [ad.instantiate_zeros(t) for t in tangents]
    return claim_p.bind(*primals, **params), claim_p.bind(*dense, **params)


def _claim_batch(operands, dims, **params):
    return claim_p.bind(*operands, **params), dims


ad.primitive_jvps[claim_p] = _claim_jvp
ad.primitive_transposes[claim_p] = lambda cotangents, *operands, **params: list(cotangents)
batching.primitive_batchers[claim_p] = _claim_batch
