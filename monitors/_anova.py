"""Trace and signal of one step's gradients: the two estimates whose ratio is the noise scale.

Group i (a worker, or one of its micro-batches) averages the gradients of `b_i` examples into `g_i`. Let `G` be the true
gradient, `Sigma` the covariance of one example's gradient, `B = sum_i b_i` and `gbar = sum_i b_i g_i / B`. Then

    E b_i |g_i|^2 = b_i |G|^2 + tr Sigma         E B |gbar|^2 = B |G|^2 + tr Sigma

and so, over n groups, the two estimates

    S = (sum_i b_i |g_i|^2 - B |gbar|^2) / (n - 1)        E S = tr Sigma          the *trace*
    Q = |gbar|^2 - S / B                                  E Q = |G|^2             the *signal*

are unbiased for any sizes `b_i` and any distribution of the examples' gradients. This is the one-way analysis of
variance, which has the least variance for Gaussian `g_i`: `Var S = 2 tr(Sigma^2) / (n - 1)`. KungFu's estimator, which
compares one worker's own gradient with the mean, has at least n - 1 times that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from adaptive.operators.sources import EXAMPLES, MICROBATCHES, read
from collectives import all_reduce

from ._squares import at_least_single

_UNKNOWN = -(2.0**20)  # a number of groups that makes the sum negative, whatever the others add


class Totals(NamedTuple):
    """Sums over all groups. Scalars, or an array with an element for each set of layers."""

    squares: jax.Array  # sum_i b_i |g_i|^2
    examples: jax.Array  # B
    groups: jax.Array  # n: groups with examples; negative if a gradient's square is not finite


def both_gradients(what: str) -> str:
    """Return advice for errors: how to call a monitor that takes the local and the averaged gradient."""
    return f"Pass both gradients:\n    avg_grads = comm.all_reduce(grads)\n    mon.{what}(grads, avg_grads)"


def summed(squares: jax.Array, *, of_examples: bool) -> Totals:
    """Sum over all workers and microbatches, in one message.

    Args:
      squares: `|g|^2` of this microbatch's mean gradient, or the mean of `|g_i|^2` over its examples, or over some of
        them in random order. Local. An array has an element for each set of layers.
      of_examples: whether groups are examples.
    """
    examples = read(EXAMPLES).astype(squares.dtype)
    groups = examples if of_examples else read(MICROBATCHES).astype(squares.dtype)
    # A sum that is not finite would skip the step, even if the driver drops such gradients or only the square
    # overflows. So the number of groups marks the sums as unknown.
    weighed = examples * squares
    known = jnp.isfinite(weighed)
    return all_reduce(
        Totals(jnp.where(known, weighed, 0), examples, jnp.where(known, groups, jnp.asarray(_UNKNOWN, groups.dtype))),
        op="sum",
    )


def estimate(sums: Totals, mean_squared_norm: jax.Array, islands: Any = 1) -> tuple[jax.Array, jax.Array]:
    """Return `(trace, signal)`, scalars, from the sums and `|gbar|^2`; NaN for fewer than two groups.

    Args:
      islands: the number m of islands, each of which has a mean gradient of its own; then `mean_squared_norm` is
        `sum_I B_I |gbar_I|^2 / B`, whose expectation is `sum_I B_I |G_I|^2 / B + m tr Sigma / B`.
    """
    # S is a sum of squares: a negative value is a rounding error.
    trace = jnp.maximum(sums.squares - sums.examples * mean_squared_norm, 0)
    trace = trace / jnp.where(sums.groups > islands, sums.groups - islands, jnp.nan)
    return trace, mean_squared_norm - trace * (islands / sums.examples)


def noise_estimate(
    batch_sizes: ArrayLike, squared_norms: ArrayLike, mean_squared_norm: ArrayLike
) -> tuple[jax.Array, jax.Array]:
    """Estimate trace and signal of one step's gradients from squared norms, for custom training loops and tests.

        trace  = (sum_i b_i |g_i|^2 - B |gbar|^2) / (n - 1)           of tr Sigma
        signal = |gbar|^2 - trace / B                                 of |G|^2

    Average each by itself over steps, and divide the averages: the mean of ratios is strongly biased (McCandlish et al.
    2018, appendix A.1).

    Args:
      batch_sizes: examples `b_i` of each group (worker or micro-batch); shape=(…, n). Empty groups are ignored.
      squared_norms: `|g_i|^2`, where `g_i` is the mean gradient of group i's examples; shape=(…, n).
      mean_squared_norm: `|gbar|^2`, of the mean gradient over all examples; shape=(…).

    Returns:
      `(trace, signal)`, each of shape=(…), in gradient units squared; `trace` is the summed variance of one example's
      gradient. The signal may be negative. NaN where fewer than two groups hold examples.

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
    return estimate(sums, mean)
