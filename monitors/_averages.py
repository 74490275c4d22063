"""Moving averages of a pair of numbers with their covariance, and confidence bounds on the ratio of the averages.

A noise scale is a ratio of two noisy averages, of which the denominator may be negative by chance. Fieller's bounds
(1954) enclose the ratios that the averages do not contradict. With m for the averages of S and Q, V for the estimated
covariance of these averages and t for a quantile of Student's distribution, these are the R = E S / E Q that satisfy

    (m_S - R m_Q)^2 <= t^2 (V_SS - 2 R V_SQ + R^2 V_QQ)

If Q is not significantly above zero, they include every large R: the ratio has a lower bound only. Samples are assumed
to be independent and identically distributed.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


class Averages(NamedTuple):
    """Exponentially weighted moments of pairs. Sample s of t has weight `decay^(t - s)`; no bias needs correction."""

    weight: Array  # (): sum of weights; 0 before the first sample
    weight_squares: Array  # (): sum of squared weights
    mean: Array  # (2,)
    spread: Array  # (2,): root of the weighted sum of (x - mean)^2; squares of small norms would leave float32's range
    correlation: Array  # (): weighted sum of (x_0 - mean_0)(x_1 - mean_1), over both spreads; 0 where one is 0


def no_samples(dtype: Any) -> Averages:
    """Return the averages before the first sample."""
    return Averages(*(np.zeros(shape, dtype) for shape in ((), (), (2,), (2,), ())))


def packed(averages: Averages) -> jax.Array:
    """Return averages as one array; shape=(7,). Each separate array of state costs microseconds per step."""
    return jnp.concatenate([jnp.ravel(x) for x in averages])


def unpacked(array: jax.Array) -> Averages:
    """Return the averages that `packed` made one array of."""
    return Averages(array[0], array[1], array[2:4], array[4:6], array[6])


def add_sample(averages: Averages, sample: jax.Array, decay: float) -> Averages:
    """Scale the weights of older samples by `decay`, and add a pair; shape=(2,). Pairs that are not finite are ignored.

    West's update (1979), which is exact; with `decay` = 1 it yields the ordinary mean and covariance.
    """
    old = decay * averages.weight
    weight = old + 1
    error = sample - averages.mean
    kept, added = decay**0.5 * averages.spread, jnp.sqrt(old / weight) * error
    spread = jnp.hypot(kept, added)
    unit = jnp.where(spread > 0, spread, 1)
    new = Averages(
        weight,
        decay**2 * averages.weight_squares + 1,
        averages.mean + error / weight,
        spread,
        averages.correlation * (kept / unit).prod() + (added / unit).prod(),
    )
    known = jnp.isfinite(sample).all()
    return jax.tree.map(lambda n, o: jnp.where(known, n, o), new, averages)


def ratio_bounds(averages: Averages, confidence: float) -> tuple[jax.Array, jax.Array]:
    """Return Fieller's `(lower, upper)` bounds on `E x_0 / E x_1`, where neither is negative; (0, inf) if unknown.

    A weighted mean has an effective number of samples `n = (sum w)^2 / sum w^2`, which approaches
    (1 + decay) / (1 - decay). With this n, `V = sum w (x - m)(x - m)' / (sum w (n - 1))` is unbiased, and t has n - 1
    degrees of freedom.
    """
    n = averages.weight**2 / averages.weight_squares
    known = n > 1
    dof = jnp.where(known, n - 1, 1)
    # In units of m + t sqrt(V), mean and margin are between 0 and 1, so that no square leaves float32's range.
    mean = jnp.maximum(averages.mean, 0)
    margin = student_t(confidence, dof) * averages.spread / jnp.sqrt(averages.weight * dof)
    unit = mean + margin
    unit = jnp.where(unit > 0, unit, 1)
    margin = margin / unit
    covariance = averages.correlation * margin.prod()
    (s, q), (ds, dq) = mean / unit, margin
    # With r = 1/R the condition is a r^2 - 2 b r + c <= 0. Its roots are (b + root) / a and c / (b + root), without
    # cancellation. If a <= 0, r has no upper bound; if c <= 0, r may be zero.
    a, b, c = (s - ds) * (s + ds), s * q - covariance, (q - dq) * (q + dq)
    b_root = b + jnp.sqrt(jnp.maximum(b * b - a * c, 0))
    scale = unit[0] / unit[1]
    lower = jnp.minimum(jnp.where(known & (a > 0), scale * a / b_root, 0), jnp.finfo(mean.dtype).max)
    return lower, jnp.where(known & (c > 0), scale * b_root / c, jnp.inf)


def student_t(confidence: float, dof: jax.Array) -> jax.Array:
    """Return the two-sided quantile of Student's distribution; `dof` may be any positive real number.

    Wallace's approximation (1959), inverted. At 95 % the result is 1 % too large for 3 degrees of freedom, 4 % for 2,
    39 % for 1: bounds are never too narrow.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    exponent = (z * (8 * dof + 3) / (8 * dof + 1)) ** 2 / dof
    return jnp.sqrt(dof * jnp.expm1(jnp.minimum(exponent, 60)))  # a larger exponent would give t > 1e13
