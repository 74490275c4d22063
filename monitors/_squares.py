"""Squared norms of pytrees, to the precision that differences of them need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from adaptive import CollectiveError
from adaptive.extend import at, current_line, current_world, tracing


def squared_norm(tree: Any, *, averaged: bool = False) -> jax.Array:
    """`|tree|^2`, the sum of squared magnitudes over all leaves: a scalar, float32 or better.

    The noise scale takes differences of squared norms that can be close to one another. So half precisions are cast up
    before they are squared, and each leaf is summed by itself before the leaves are: XLA adds the elements of one
    reduction in a tree (relative error on 25 million equal squares: 1e-7), and the sum over leaves is short.

    Args:
      averaged: whether these are results of messages. Then the norm reads them where they arrived.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    dtype = at_least_single(*(leaf.real.dtype for leaf in leaves))
    if not averaged:
        # Flat, as they are sent, and behind a barrier: XLA would transpose a gradient that it computes in another order
        # twice, once for the message and once more in this shape. A result of a message must not be treated so: then
        # the division by its weight would not be fused into what reads it, the update included.
        leaves = [jax.lax.optimization_barrier(leaf.reshape(-1)) for leaf in leaves]
    squares = [jnp.sum(jnp.square(_magnitude(leaf).astype(dtype))) for leaf in leaves]
    return sum(squares, jnp.zeros((), dtype))


def at_least_single(*dtypes: Any) -> Any:
    """The widest of these, or float32 where that is wider: what to compute in, whatever promotion is in force."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(jnp.float32, *dtypes)


def _magnitude(leaf: jax.Array) -> jax.Array:
    return jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf


def check_alike(what: str, grads: Any, avg_grads: Any) -> None:
    """Refuse two gradients that are not of one model, and one gradient that is given twice.

    Raises:
      CollectiveError: they differ in structure or in a leaf's shape; or they are the same arrays.
    """
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(avg_grads), strict=False))
    world = current_world.get()
    alone = tracing() is None and (world is None or world.capacity == 1)  # there a value is its own mean
    if pairs and not alone and all(own is averaged for own, averaged in pairs):
        raise CollectiveError(
            f"{what}{at(current_line())} is given one gradient in both places: there is nothing to tell noise by. "
            "Give this worker's own and its mean over all workers:\n"
            f"    avg_grads = comm.all_reduce(grads)\n    mon.{what}(grads, avg_grads)"
        )
    own, averaged = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (grads, avg_grads))
    shapes = [{jax.tree_util.keystr(p): jnp.shape(leaf) for p, leaf in tree.items()} for tree in (own, averaged)]
    for name in [*shapes[0], *shapes[1]]:
        first, second = (s.get(name, "missing") for s in shapes)
        if first != second:
            raise CollectiveError(
                f"{what}{at(current_line())}: the two gradients differ: grads{name} is {first}, avg_grads{name} is "
                f"{second}. Give this worker's gradient and its mean over all workers:\n"
                f"    avg_grads = comm.all_reduce(grads)\n    mon.{what}(grads, avg_grads)"
            )
