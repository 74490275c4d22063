"""Assertions about how widely a value is replicated, for values where the graph cannot tell."""

from __future__ import annotations

from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .context import only_in_programs

T = TypeVar("T")

assert_scope_p = Primitive("assert_scope")  # *values -> *values
assert_scope_p.multiple_results = True
only_in_programs(assert_scope_p)
assert_scope_p.def_abstract_eval(lambda *operands, scope, what: list(operands))
assert_scope_p.def_impl(lambda *operands, scope, what: list(operands))


def assert_scope(scope: Literal["replicated", "local", "reduced"], tree: T, what: str) -> T:
    """Return a pytree unchanged, with an assertion about its scope, which is checked when a program is built.

    Args:
      scope: "replicated": the user asserts that values which the graph treats as local (results of a host callback)
        are equal on all workers. "local": at least one leaf must differ between workers. "reduced": all leaves must be
        replicated.
      tree: a pytree of arrays; local or replicated.
      what: the operator that makes the assertion, for errors.
    """
    leaves, tree_of = jax.tree.flatten(tree)
    if not leaves:
        return tree
    return jax.tree.unflatten(tree_of, assert_scope_p.bind(*map(jnp.asarray, leaves), scope=scope, what=what))


def _assert_scope_jvp(primals, tangents, **params):
    dense = [ad.instantiate_zeros(t) for t in tangents]
    return assert_scope_p.bind(*primals, **params), assert_scope_p.bind(*dense, **params)


def _assert_scope_batch(operands, dims, **params):
    return assert_scope_p.bind(*operands, **params), dims


ad.primitive_jvps[assert_scope_p] = _assert_scope_jvp
ad.primitive_transposes[assert_scope_p] = lambda cotangents, *operands, **params: list(cotangents)
batching.primitive_batchers[assert_scope_p] = _assert_scope_batch
