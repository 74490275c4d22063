"""Spikes of a loss or of a gradient norm, against the median of the last steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import CollectiveError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.numbers import whole
from adaptive.operators.operator_state import operator_state
from adaptive.operators.replication_claims import assert_scope

from ._squares import at_least_single

# The standard deviation of a normal distribution, in median and in mean absolute deviations.
_OF_MEDIAN, _OF_MEAN = 1.4826, 1.2533
_REDUCED = """Pass a reduced value:
    loss, grads = comm.all_reduce((loss, grads))
    spike = mon.spike(mon.gradient_norm(grads))"""


def spike(value: Any, *, window: int = 128, factor: float = 6.0) -> jax.Array:
    """Return whether a value, such as the loss or the norm of the gradient, is far above its values in the last steps.

        value > median + factor * deviation

    with the median of the last `window` finite values, and their standard deviation, estimated as 1.4826 times the
    median absolute deviation. A new level counts as spikes until it fills half of the window. If more than half of the
    values are equal, the mean absolute deviation is used, as in Iglewicz and Hoaglin's scores; and if all are, the
    rounding of the dtype. A value that is not finite is a spike, and does not enter the window. A finite value can be a
    spike when half of the window is filled.

    Keeps `window + 1` numbers of state; no communication. docs/recipes.md has a step that keeps its state on a spike.

    Args:
      value: one real number. Replicated.
      window: number of values that it is compared with; at least 8.
      factor: how many standard deviations above the median a spike is; positive.

    Returns:
      A boolean scalar. Replicated.

    Raises:
      CollectiveError: `value` is not one real number, an option is out of range, or, when the program is built, a value
        that can differ between workers.

    Example:
      >>> spiked = mon.spike(mon.gradient_norm(avg_grads))                      # doctest: +SKIP

    References:
      Iglewicz and Hoaglin 1993, "How to detect and handle outliers".
    """
    value = jnp.asarray(value)
    is_number = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    size = whole(window) or 0
    wrong = [
        f"expected one real number, got {value.dtype}{list(value.shape)}" if value.ndim or not is_number else "",
        f"window={window!r} must be a whole number, at least 8" if size < 8 else "",
        f"factor={factor!r} must be positive" if not factor > 0 else "",
    ]
    if any(wrong):
        raise CollectiveError(f"spike{at(current_line())}: {', '.join(filter(None, wrong))}.")
    value = assert_scope("reduced", value, "spike", hint=_REDUCED)
    dtype = at_least_single(value.dtype)
    rounding = float(jnp.finfo(value.dtype if jnp.issubdtype(value.dtype, jnp.inexact) else dtype).eps)
    value = value.astype(dtype)

    def update(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        count, values = state[0].astype(jnp.int32), state[1:]
        middle = _median(values, count)
        apart = jnp.abs(values - middle)
        least, robust = rounding * jnp.abs(middle), _OF_MEDIAN * _median(apart, count)
        mean = jnp.where(jnp.arange(size) < count, apart, 0).sum() / jnp.maximum(state[0], 1)
        deviation = jnp.where(robust > least, robust, jnp.maximum(_OF_MEAN * mean, least))
        finite = jnp.isfinite(value)
        above = (2 * count >= size) & (value > middle + factor * deviation)
        entered = jnp.concatenate([jnp.minimum(state[:1] + 1, size), value[None], values[:-1]])
        return jnp.where(finite, entered, state), ~finite | above

    return operator_state("spike", np.zeros(size + 1, dtype), update)


def _median(values: jax.Array, count: jax.Array) -> jax.Array:
    """Return the median of the first `count` values; infinite if there are none."""
    there = jnp.arange(len(values)) < count
    ordered = jnp.sort(jnp.where(there, values, jnp.inf))
    return ordered[jnp.maximum(count - 1, 0) // 2] / 2 + ordered[count // 2] / 2
