"""Statistics of one step's gradients, as they are: norm and variance."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from adaptive.extend import assert_scope

from ._anova import estimate, totals
from ._squares import check_alike, squared_norm


def gradient_norm(grads: Any) -> jax.Array:
    """The gradient's Euclidean norm over all leaves, `sqrt(sum |g|^2)`.

    Costs nothing on a message. Half precisions are squared in float32, where their squares do not overflow. Infinite
    where the sum of squares is not a float32: from a norm of 1.8e19 on.

    Args:
      grads: pytree of arrays; local, or averaged.

    Returns:
      A scalar of float32 (float64 if a leaf is). Replicated if `grads` are.

    Example:
      >>> float(gradient_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}))
      5.0
    """
    return jnp.sqrt(squared_norm(grads))


def gradient_variance(grads: Any, avg_grads: Any) -> jax.Array:
    """How much the gradients of single examples scatter: `tr Sigma`, the summed variance of their coordinates.

    One step's estimate, over n groups (workers and their micro-batches) of `b_i` examples with mean gradients `g_i`:

        (sum_i b_i |g_i|^2 - B |gbar|^2) / (n - 1)

    unbiased for any sizes, so it can be compared between batch sizes; divided by the global batch it is the variance of
    `avg_grads`. Not averaged over steps: see `ema` and `noise_scale`. Costs 12 bytes on the gradients' message.

    Args:
      grads: pytree; the mean gradient over this worker's examples. Local.
      avg_grads: pytree; its mean over all examples, `comm.all_reduce(grads)`. Replicated.

    Returns:
      A scalar of float32 (float64 if gradients are), in gradient units squared. Replicated. NaN where there are fewer
      than two groups, or a gradient's square is not finite.

    Raises:
      CollectiveError: gradients of different structure or shapes, one gradient in both places, or, when the program is
        built, `grads` that are replicated, averaged already, or `avg_grads` that are not.

    References:
      The gradient variance that KungFu monitors (Mai et al. 2020, "KungFu", section 3) is that between workers'
      batches, `E|g_i|^2 - |gbar|^2`, and so shrinks with the batch. This one is of examples.
    """
    check_alike("gradient_variance", grads, avg_grads)
    avg_grads = assert_scope("reduced", avg_grads, "gradient_variance")
    return estimate(totals(grads, "gradient_variance"), squared_norm(avg_grads, averaged=True), None)[0]
