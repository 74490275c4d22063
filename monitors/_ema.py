"""An exponential moving average of any pytree of numbers, kept from step to step."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import CollectiveError
from adaptive.base.process.source_lines import at, current_line
from adaptive.operators.operator_state import operator_state

from ._squares import at_least_single

T = TypeVar("T")
State = tuple[jax.Array, jax.Array]  # mean and weight of each element


def ema(x: T, decay: float = 0.9) -> T:
    """Return the exponential moving average of `x` over steps, without the bias of a start at zero.

    After t steps the average is

        sum_s decay^(t - s) x_s / sum_s decay^(t - s)

    Elements that are not finite are ignored, each by itself: seconds are NaN in the first step, and one infinite value
    would never fade. Keeps two numbers of state per element of `x`; no communication.

    Args:
      x: pytree of real or complex numbers. Local or replicated.
      decay: factor of the weights from one step to the next, at least 0 and below 1.

    Returns:
      A pytree with the structure and shapes of `x`, in the units of `x`. Averages are computed in float32 or better;
      floats are returned in their own dtype, integers as floats. NaN where no finite value has been seen. Replicated if
      `x` is.

    Raises:
      CollectiveError: `decay` is out of range.

    Example:
      >>> smooth = mon.ema(comm.all_reduce(loss), decay=0.99)            # doctest: +SKIP

    References:
      Kingma and Ba 2015, "Adam", section 3 (the bias correction, here in recursive form).
    """
    if not 0 <= decay < 1:
        raise CollectiveError(f"ema{at(current_line())}: decay={decay!r} must be at least 0 and below 1.")
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, x))
    zeros = [np.zeros(leaf.shape, at_least_single(leaf.dtype)) for leaf in leaves]
    init = [(zero, np.zeros(zero.shape, zero.real.dtype)) for zero in zeros]

    def update(state: list[State]) -> tuple[list[State], list[jax.Array]]:
        new = [average(leaf, *old, decay=decay) for leaf, old in zip(leaves, state, strict=True)]
        return new, [_seen(mean, weight, leaf.dtype) for (mean, weight), leaf in zip(new, leaves, strict=True)]

    return jax.tree.unflatten(tree, operator_state("ema", init, update))


def average(x: jax.Array, mean: jax.Array, weight: jax.Array, *, decay: float) -> State:
    """Return `(mean, weight)` after one more value, elementwise. The incremental form keeps constants exact."""
    new = decay * weight + 1
    finite = jnp.isfinite(x)
    x = x.astype(mean.dtype)
    return jnp.where(finite, mean + (x - mean) / new.astype(mean.dtype), mean), jnp.where(finite, new, weight)


def _seen(mean: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    result = jnp.where(weight > 0, mean, jnp.nan)
    return result.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else result
