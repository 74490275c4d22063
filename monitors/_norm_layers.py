"""Squared gradient norms of single examples, estimated from those of the norm layers.

The gradients of norm layers (LayerNorm, RMSNorm, GroupNorm) have cheap norms, and these rise and fall with the norm of
the whole gradient from example to example (Gray et al. 2024). With r_b for the squared norm over the norm layers, and
f_bl for the one of another leaf l,

    c_l = <f_bl> / <r_b>          f_bl is estimated as c_l r_b

where the means are over the examples of the steps in which both are computed: the first step, further ones at intervals
that double, and each k-th step from then on. The ratios are operator state. They weigh a measurement by 0.7 for each
later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import CollectiveError
from adaptive.extend import operator_state
from collectives import all_reduce

from ._example_trace import Use
from ._squares import at_least_single

_KEEP = 0.7  # weight of a measurement of the ratios, relative to the one after it


def norm_layer_leaves(uses: Sequence[Use], paths: Sequence[tuple[Any, ...]], leaves: Sequence[Any]) -> list[int]:
    """Return the indices of the leaves that belong to norm layers, in increasing order.

    A norm layer's scale multiplies values of examples elementwise. Its bias is a leaf of the same shape whose path
    differs in one part, such as `["LayerNorm_0"]["bias"]`, and that takes part in elementwise operations only.
    """
    scales: set[int] = set()
    elementwise: set[int] = set()
    others: set[int] = set()
    for use in uses:
        name = use.eqn.primitive.name
        for operand in use.operands:
            if operand.node is not None:
                found = {leaf for leaf in operand.node.leaves() if leaves[leaf].size > 1}
                scales |= found if name == "mul" else set()
                (elementwise if name in ("mul", "add", "add_any", "sub") else others).update(found)
    scales -= others

    def beside(leaf: int, scale: int) -> bool:
        """Return whether the paths differ in one part, such as "bias" and "scale"."""
        pairs = list(zip(paths[leaf], paths[scale], strict=False))
        same_length = len(pairs) == len(paths[leaf]) == len(paths[scale])
        return same_length and sum(own != other for own, other in pairs) == 1

    def is_bias(leaf: int) -> bool:
        return any(leaves[leaf].shape == leaves[scale].shape and beside(leaf, scale) for scale in scales)

    return sorted(scales | set(filter(is_bias, elementwise - others)))


def estimated_squares(
    compute: Callable[[Sequence[int]], list[jax.Array]],
    compute_afresh: Callable[[Sequence[int]], list[jax.Array]],
    own: Sequence[int],
    n_leaves: int,
    every: int,
) -> list[jax.Array]:
    """Return each leaf's squared norms, shape=(examples,): computed in every `every`-th step, estimated in between.

    Args:
      compute: returns the squared norms of the leaves with these indices.
      compute_afresh: does the same by another evaluation of the loss, which then takes parameters and batch as operands
        of the conditional. Values within the first one as operands cost a fourth of a step in each step.
      own: the norm layers' leaves, whose norms are computed in each step.
    """
    others = [index for index in range(n_leaves) if index not in own]
    of_own = compute(own)
    if not others:
        return of_own
    dtype = at_least_single(*(squares.dtype for squares in of_own))
    rows = jnp.sum(jnp.stack([squares.astype(dtype) for squares in of_own]), 0)

    def update(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        wait, interval, total, sums = state[0], state[1], state[2], state[3:]
        due = wait <= 0

        def whole() -> jax.Array:
            return jnp.stack([squares.astype(dtype) for squares in compute_afresh(others)])

        def ratios() -> jax.Array:
            return (sums / jnp.where(total > 0, total, jnp.nan))[:, None] * rows[None]

        squares = jax.lax.cond(due, whole, ratios)
        measured = jnp.concatenate([jnp.sum(rows)[None], jnp.sum(squares, 1)])
        # Sums that are not finite would skip the step, even if the driver drops such gradients.
        measured = all_reduce(jnp.where(due & jnp.isfinite(measured).all(), measured, 0), op="sum")
        next_interval = jnp.where(due, jnp.minimum(2 * interval, every), interval)
        times = jnp.stack([jnp.where(due, interval, wait) - 1, next_interval])
        averages = jnp.where(due & (measured[0] > 0), _KEEP * state[2:] + measured, state[2:])
        return jnp.concatenate([times, averages]), squares

    start = np.zeros(3 + len(others), dtype)
    start[1] = 1
    squares = operator_state("example_norms", start, update)
    found = dict(zip(own, of_own, strict=True)) | dict(zip(others, squares, strict=True))
    return [found[index] for index in range(n_leaves)]


def no_norm_layers(start: str) -> CollectiveError:
    """Return the error of a model without norm layers."""
    return CollectiveError(
        f"{start}full_every= estimates norms from those of norm layers in between, but no parameter multiplies the "
        "values of examples elementwise, as the scale of a norm layer does. Leave out full_every= to compute the norms "
        "of all layers in each step, or compute those of a few examples: example_norms(loss_fn, sample=4)."
    )
