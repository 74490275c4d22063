"""Squared norms of pytrees, precise enough for differences between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from adaptive import CollectiveError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.current import current_world
from adaptive.operators.context import tracing


def squared_norm(tree: Any, *, averaged: bool = False) -> jax.Array:
    """Return `|tree|^2`, the sum of squared magnitudes over all leaves: a scalar, float32 or better.

    The noise scale depends on differences between squared norms of similar size. So half precisions are cast up before
    they are squared, and each leaf is reduced by itself, in a tree (relative error for 25 million equal squares: 1e-7).

    Args:
      tree: pytree of arrays.
      averaged: whether the leaves are results of messages, which the norm then reads where they arrived.
    """
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    dtype = at_least_single(*(leaf.real.dtype for leaf in leaves))
    if not averaged:
        # Flattened as in the message, with a barrier, or XLA may transpose a gradient twice. For results of messages, a
        # barrier would prevent that the division by the weight is fused into the update.
        leaves = [jax.lax.optimization_barrier(leaf.reshape(-1)) for leaf in leaves]
    sizes = [jnp.abs(leaf) if jnp.iscomplexobj(leaf) else leaf for leaf in leaves]
    return sum((jnp.sum(jnp.square(size.astype(dtype))) for size in sizes), jnp.zeros((), dtype))


def at_least_single(*dtypes: Any) -> Any:
    """Return the dtype to compute in: the widest of these and float32, whatever promotion rule is in force."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(jnp.float32, *dtypes)


def check_alike(what: str, grads: Any, avg_grads: Any) -> None:
    """Check that the two gradients are of one model, and not the same arrays.

    Raises:
      CollectiveError: the gradients differ in structure or in a leaf's shape, or are the same arrays.
    """
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(avg_grads), strict=False))
    world = current_world.get()
    alone = tracing() is None and (world is None or world.capacity == 1)  # a single worker's value is its own mean
    if pairs and not alone and all(own is averaged for own, averaged in pairs):
        raise CollectiveError(
            f"{what}{at(current_line())} has the same gradient twice, so noise cannot be measured. Pass this worker's "
            "own and its mean over all workers:\n"
            f"    avg_grads = comm.all_reduce(grads)\n    mon.{what}(grads, avg_grads)"
        )
    own, averaged = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (grads, avg_grads))
    shapes = [{jax.tree_util.keystr(p): jnp.shape(leaf) for p, leaf in tree.items()} for tree in (own, averaged)]
    for name in [*shapes[0], *shapes[1]]:
        first, second = (s.get(name, "missing") for s in shapes)
        if first != second:
            raise CollectiveError(
                f"{what}{at(current_line())}: the two gradients differ: grads{name} is {first}, avg_grads{name} is "
                f"{second}. Pass this worker's gradient and its mean over all workers:\n"
                f"    avg_grads = comm.all_reduce(grads)\n    mon.{what}(grads, avg_grads)"
            )


def check_norms(grads: Any, norms: Any) -> None:
    """Check that norms are those of `example_norms`, for these gradients and for all examples or some of them.

    Raises:
      CollectiveError: the norms have another structure than the gradients, or are not one per example.
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(norms)]
    trace = tracing()
    same = jax.tree.structure(norms) == jax.tree.structure(grads) and len(set(shapes)) == 1 and len(shapes[0]) == 1
    if same and (trace is None or shapes[0][0] in {trace.examples, *trace.sampled}):
        return
    raise CollectiveError(
        f"noise_scale{at(current_line())}: per_example must hold the squared gradient norm of each example, for each "
        "leaf of the gradients. Write\n"
        "    loss, grads, norms = mon.example_norms(loss_fn)(params, batch)\n"
        "    mon.noise_scale(grads, comm.all_reduce(grads), per_example=norms)"
    )
