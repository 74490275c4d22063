"""Assertions of operators and users about the scope of a value: replicated, or local."""

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
assert_scope_p.def_abstract_eval(lambda *operands, scope, what, hint: list(operands))
assert_scope_p.def_impl(lambda *operands, scope, what, hint: list(operands))


def assert_scope(scope: Literal["replicated", "local", "reduced"], tree: T, what: str, *, hint: str = "") -> T:
    """Return a pytree unchanged, with an assertion about its scope, which is checked when a program is built.

    Args:
      scope: one of three assertions.
        "local": the caller needs values that differ between workers, such as this worker's gradient. An error if all
        leaves are replicated.
        "reduced": the caller needs values that are equal on all workers, such as the averaged gradient. An error if the
        graph shows that a leaf can differ.
        "replicated": the user asserts that values which the graph treats as local, such as the result of a host
        callback, are equal on all workers. Treated as replicated from here on; an error only for values that depend on
        the batch.
      tree: a pytree of arrays; local or replicated.
      what: the operator that makes the assertion, for errors.
      hint: what to write instead, for the error: one or several lines. By default, general advice for the scope.
    """
    leaves, tree_of = jax.tree.flatten(tree)
    if not leaves:
        return tree
    claimed = assert_scope_p.bind(*map(jnp.asarray, leaves), scope=scope, what=what, hint=hint)
    return jax.tree.unflatten(tree_of, claimed)


def _assert_scope_jvp(primals, tangents, **params):
    dense = [ad.instantiate_zeros(t) for t in tangents]
    return assert_scope_p.bind(*primals, **params), assert_scope_p.bind(*dense, **params)


def _assert_scope_batch(operands, dims, **params):
    return assert_scope_p.bind(*operands, **params), dims


ad.primitive_jvps[assert_scope_p] = _assert_scope_jvp
ad.primitive_transposes[assert_scope_p] = lambda cotangents, *operands, **params: list(cotangents)
batching.primitive_batchers[assert_scope_p] = _assert_scope_batch
