"""Statistics of one step's gradients, not averaged over steps: norm and variance."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from adaptive.operators.replication_claims import assert_mean

from ._anova import both_gradients, estimate, summed
from ._squares import check_alike, squared_norm


def gradient_norm(grads: Any) -> jax.Array:
    """Return the gradient's Euclidean norm over all leaves, `sqrt(sum |g|^2)`.

    No communication. Half precisions are squared in float32, where their squares do not overflow. Infinite if the sum
    of squares overflows float32, from a norm of 1.8e19 on.

    Args:
      grads: pytree of arrays. Local or replicated.

    Returns:
      A scalar in gradient units; float32 (float64 if a leaf is). Replicated if `grads` are.

    Example:
      >>> float(gradient_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}))
      5.0
    """
    return jnp.sqrt(squared_norm(grads))


def gradient_variance(grads: Any, avg_grads: Any) -> jax.Array:
    """Estimate `tr Sigma`, the variance of one example's gradient summed over its coordinates, from one step.

    The estimate over n groups (workers and their micro-batches) of `b_i` examples with mean gradients `g_i`

        (sum_i b_i |g_i|^2 - B |gbar|^2) / (n - 1)

    is unbiased for any sizes. Divided by the global batch, it is the variance of `avg_grads`. Not averaged over steps:
    see `ema` and `noise_scale`. Adds 12 bytes to the gradients' message.

    Args:
      grads: pytree; the mean gradient over this worker's examples. Local.
      avg_grads: pytree; its mean over all examples, `comm.all_reduce(grads)`. Replicated.

    Returns:
      A scalar in gradient units squared; float32 (float64 if gradients are). Replicated. NaN for fewer than two groups,
      or if a gradient's square is not finite.

    Raises:
      CollectiveError: as for `noise_scale`.

    References:
      Mai et al. 2020, "KungFu", section 3, which monitors the variance between workers' batches; it shrinks with them.
    """
    check_alike("gradient_variance", grads, avg_grads)
    grads, avg_grads = assert_mean(grads, avg_grads, what := "gradient_variance", hint=both_gradients(what))
    sums = summed(squared_norm(grads), of_examples=False)
    return estimate(sums, squared_norm(avg_grads, averaged=True))[0]
