"""Assertions of operators and users about the scope of a value: replicated, or local."""

from __future__ import annotations

from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from adaptive.base.values.jaxprs import Primitive

from .context import only_in_programs

T = TypeVar("T")

assert_scope_p = Primitive("assert_scope")  # *values -> *values
assert_scope_p.multiple_results = True
only_in_programs(assert_scope_p)
assert_scope_p.def_abstract_eval(lambda *operands, **params: list(operands))
assert_scope_p.def_impl(lambda *operands, **params: list(operands))

Claim = Literal["replicated", "local", "independent", "reduced", "before"]


def assert_scope(scope: Claim, tree: T, what: str, *, hint: str = "") -> T:
    """Return a pytree unchanged, with an assertion about its scope, which is checked when a program is built.

    Args:
      scope: one of five assertions.
        "local": values that differ between workers, such as this worker's gradient. An error if all are replicated.
        "independent": the same, for differences that are taken for sampling noise. Also an error if a collective in a
        backward pass couples them, as in batch normalization over all workers.
        "reduced": values that are equal on all workers, such as the averaged gradient. An error if a leaf can differ.
        "before": the same, and known before the step, such as the optimizer's state before its update. Also an error
        if a leaf depends on a reduction of the same step.
        "replicated": values that the graph treats as local, such as the result of a host callback, are equal on all
        workers. They count as replicated from here on. An error only for values that depend on the batch.
      tree: a pytree of arrays; local or replicated.
      what: the operator that makes the assertion, for errors.
      hint: what to write instead, for the error. By default, general advice for the scope.

    Raises:
      CollectiveError: when the program is built, values of another scope than asserted.
    """
    return _claimed(scope, tree, what, hint, paired=False)


def assert_mean(local: T, mean: T, what: str, *, hint: str = "") -> tuple[T, T]:
    """Return two pytrees unchanged, with the assertion that one is the mean of the other over all examples.

    When a program is built, `local` must be independent and `mean` reduced, as for `assert_scope`. `Program.check`
    computes both for a single microbatch of one worker, where they are equal, and names `what` if they are not.

    Args:
      local: pytree of arrays, such as this worker's gradient.
      mean: its mean over all examples; a pytree of the same shapes.
      what, hint: as for `assert_scope`.

    Raises:
      CollectiveError: when the program is built, `local` that is replicated or coupled, or a `mean` that can differ.
    """
    mean = _claimed("reduced", mean, what, hint, paired=True)
    return _claimed("independent", local, what, hint, paired=True), mean


def _claimed(scope: Claim, tree: T, what: str, hint: str, *, paired: bool) -> T:
    leaves, tree_of = jax.tree.flatten(tree)
    if not leaves:
        return tree
    claimed = assert_scope_p.bind(*map(jnp.asarray, leaves), scope=scope, what=what, hint=hint, paired=paired)
    return jax.tree.unflatten(tree_of, claimed)


def _assert_scope_jvp(primals, tangents, **params):
    dense = [ad.instantiate_zeros(t) for t in tangents]
    return assert_scope_p.bind(*primals, **params), assert_scope_p.bind(*dense, **params)


def _assert_scope_batch(operands, dims, **params):
    return assert_scope_p.bind(*operands, **params), dims


ad.primitive_jvps[assert_scope_p] = _assert_scope_jvp
ad.primitive_transposes[assert_scope_p] = lambda cotangents, *operands, **params: list(cotangents)
batching.primitive_batchers[assert_scope_p] = _assert_scope_batch
