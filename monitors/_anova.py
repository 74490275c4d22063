"""Trace and signal of one step's gradients: what a noise scale is made of.

Group i (a worker, or one of its micro-batches: a worker that runs after another) averages the gradients of `b_i`
examples into `g_i`. With `G` for the true gradient, `Sigma` for the covariance of one example's gradient,
`B = sum_i b_i` and `gbar = sum_i b_i g_i / B`:

    E b_i |g_i|^2 = b_i |G|^2 + tr Sigma         E B |gbar|^2 = B |G|^2 + tr Sigma

so that, over n groups, the two estimates

    S = (sum_i b_i |g_i|^2 - B |gbar|^2) / (n - 1)        E S = tr Sigma          the *trace*
    Q = |gbar|^2 - S / B                                  E Q = |G|^2             the *signal*

are unbiased for any sizes `b_i` and any distribution of the examples' gradients. This is the one-way analysis of
variance; among unbiased quadratic estimators that do not depend on the origin it has the least variance for Gaussian
`g_i`, whatever `G` and `Sigma`: `Var S = 2 tr(Sigma^2) / (n - 1)`. For equal sizes it is the estimator of McCandlish et
al. 2018, appendix A.1, averaged over the workers. KungFu's, which compares one worker's own gradient with the mean, has
n + 1 times the variance of S and more; Cannikin's weights are unbiased too, with up to nine times the variance at the
sizes tried here.

All that travels is known before the gradients leave: `sum_i b_i |g_i|^2`, B and n are three numbers on their message.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from adaptive.extend import CALLS, EXAMPLES, assert_scope, read
from collectives import all_reduce

from ._squares import at_least_single, squared_norm

_UNKNOWN = -(2.0**20)  # groups: fewer than there can be others


class Totals(NamedTuple):
    """Sums over all groups."""

    squares: jax.Array  # sum_i b_i |g_i|^2
    examples: jax.Array  # B
    groups: jax.Array  # n: those that hold examples; negative where a gradient's square is not finite


def totals(grads: Any, what: str) -> Totals:
    """Sum over all workers and micro-batches; 12 bytes on the gradients' message. Replicated.

    Args:
      grads: refused where they are replicated: groups that are all alike tell nothing.
      what: the monitor that asks, for errors.
    """
    grads = assert_scope("local", grads, what)
    examples = read(EXAMPLES)
    squares = squared_norm(grads)
    examples, calls = examples.astype(squares.dtype), read(CALLS).astype(squares.dtype)
    # A sum that is not finite would end the step, also where the driver leaves such a gradient out, or only its square
    # overflows. So the number of groups says that nothing is known.
    weighed = examples * squares
    known = jnp.isfinite(weighed)
    return all_reduce(
        Totals(jnp.where(known, weighed, 0), examples, jnp.where(known, calls, jnp.asarray(_UNKNOWN, calls.dtype))),
        op="sum",
    )


def estimate(sums: Totals, mean_squared_norm: jax.Array, dataset_size: float | None) -> tuple[jax.Array, jax.Array]:
    """`(trace, signal)` from the sums and `|gbar|^2`; NaN for fewer than two groups."""
    # S is a sum of squares: below zero it is rounding.
    trace = jnp.maximum(sums.squares - sums.examples * mean_squared_norm, 0)
    trace = trace / jnp.where(sums.groups > 1, sums.groups - 1, jnp.nan)
    # Drawn without replacement from N examples, Var gbar = tr Sigma (1/B - 1/N), with Sigma over N - 1.
    sampling = 1 / sums.examples
    if dataset_size is not None:
        sampling = jnp.maximum(sampling - 1 / dataset_size, 0)
    return trace, mean_squared_norm - trace * sampling


def noise_estimate(
    batch_sizes: ArrayLike,
    squared_norms: ArrayLike,
    mean_squared_norm: ArrayLike,
    *,
    dataset_size: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Trace and signal of one step, from numbers: for training loops of your own, and for tests.

    Both are unbiased, for any batch sizes:

        trace  = (sum_i b_i |g_i|^2 - B |gbar|^2) / (n - 1)           of tr Sigma
        signal = |gbar|^2 - trace (1/B - 1/dataset_size)              of |G|^2

    Average each over steps, and only then divide: the mean of ratios is far off (McCandlish et al. 2018, appendix A.1).

    Args:
      batch_sizes: examples `b_i` of each group (worker or micro-batch), on the last axis; empty groups are passed over.
      squared_norms: `|g_i|^2`, where `g_i` is the mean gradient of group i's examples. Shape of `batch_sizes`.
      mean_squared_norm: `|gbar|^2`, of the mean gradient over all examples. Without the last axis.
      dataset_size: number of examples in the data set that the batch is drawn from without replacement, if that
        matters: if the batch is a good part of it.

    Returns:
      `(trace, signal)`, each of the shape of `mean_squared_norm`, in gradient units squared; `trace` is of one example.
      The signal may be negative. NaN where fewer than two groups hold examples.

    Example:
      >>> trace, signal = noise_estimate([1, 2, 3], [5.0, 10.0, 1.0], 29 / 18)   # g = (1, 2), (3, -1), (0, 1)
      >>> f"{trace:.4f} {signal:.4f}"
      '9.1667 0.0833'
    """
    given = [jnp.asarray(x) for x in (batch_sizes, squared_norms, mean_squared_norm)]
    dtype = at_least_single(*(x.dtype for x in given))
    sizes, norms, mean = (x.astype(dtype) for x in given)
    squares = jnp.sum(jnp.where(sizes > 0, sizes * norms, 0), axis=-1)
    sums = Totals(squares, jnp.sum(sizes, axis=-1), jnp.sum(sizes > 0, axis=-1, dtype=dtype))
    return estimate(sums, mean, dataset_size)
