"""The noise scale from the moments that Adam keeps: no second group, no communication, three metrics.

Adam's moments are weighted means over past steps k of the averaged gradient and its square. Let that gradient have mean
`G_j` and variance `sigma_j^2 / B_k`, independent between steps. With normalized weights u_k of the first moment m and
v_k of the second one s (both without bias), and

    h1 = sum_k u_k^2 / B_k            h2 = sum_k v_k / B_k

the expectations are, for each element j,

    E m_j^2 = G_j^2 + h1 sigma_j^2    E s_j = G_j^2 + h2 sigma_j^2

and so `(s_j - m_j^2) / (h2 - h1)` is an unbiased estimate of `sigma_j^2`, for any steps and batches, as long as G is
constant over the memory of s. While G changes, s - m^2 contains the change, and the noise is overestimated.

In each metric the noise scale is the batch at which the update's noise and signal have equal norms:

    Euclidean    sum_j sigma_j^2 / sum_j G_j^2
    Adam         the same of gradients divided by p_j = sqrt(s_j) + eps
    sign         (sum_j sigma_j / sum_j |G_j|)^2, the ratio of norms dual to the largest element

The last needs |G_j|, and |m_j| is larger by noise of variance `t_j^2 = h1 sigma_j^2`. So |G_j| is taken as `c |m_j|`,
with the c between 0 and 1 for which the noise explains the rest:

    mean_j E|N(c m_j, t_j^2)| = mean_j |m_j|,    E|N(a, t^2)| = t sqrt(2/pi) exp(-a^2 / 2 t^2) + a erf(a / t sqrt 2)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import CollectiveError
from adaptive.extend import GLOBAL_BATCH, assert_scope, at, current_line, operator_state, read

from ._squares import at_least_single

_UPDATE_BY_AVERAGES = """Update the optimizer by averaged gradients, and pass its state:
    avg_grads = comm.all_reduce(grads)
    updates, opt_state = optimizer.update(avg_grads, opt_state, params)
    mon.moment_noise(opt_state)"""

_SAMPLE = 1 << 16  # elements from which c is found
_HALVINGS = 20


class MomentNoise(NamedTuple):
    """Noise scales of one gradient in three metrics. Each field is a scalar, in examples; replicated.

    NaN before the second step; infinite if the noise hides the signal.
    """

    euclidean: jax.Array
    adam: jax.Array
    sign: jax.Array


def moment_noise(opt_state: Any, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> MomentNoise:
    """Estimate noise scales from the moments of optax's Adam, for one worker as for many.

    Needs no second group and no communication, and costs a pass over the moments. The averages reach back
    `1 / (1 - b2)` steps, and noise scales are overestimated if the gradient's mean changes within that time: with
    b2 = 0.999 after some thousand steps of slow change only. `_moments.py` has the derivation. There are no confidence
    bounds, because consecutive estimates are of overlapping steps.

    The moments are those of the gradients that the optimizer receives: clipped ones, if it clips them before.

    Args:
      opt_state: the state of an optax optimizer that contains one state of Adam (`optax.adam`, `adamw`), before this
        step's update. Replicated.
      b1, b2, eps: the optimizer's. `b2` must be larger than `b1`.

    Returns:
      `MomentNoise(euclidean, adam, sign)`: the noise scales for SGD, for Adam, and for methods that use the gradient's
      sign (Lion, Signum). Scalars, in examples, float32 or better. Replicated. NaN before the second step.

    Raises:
      CollectiveError: `opt_state` has no state of Adam or several, `b1` or `b2` is out of range, or, when the program
        is built, the state is local.

    Example:
      >>> noise = mon.moment_noise(opt_state, b2=0.99)                            # doctest: +SKIP
    """
    start = f"moment_noise{at(current_line())}: "
    if not 0 <= b1 < b2 < 1:
        raise CollectiveError(f"{start}b1={b1!r} and b2={b2!r} must satisfy 0 <= b1 < b2 < 1.")
    state = assert_scope("reduced", _adam_state(opt_state, start), "moment_noise", hint=_UPDATE_BY_AVERAGES)
    means, squares = jax.tree.leaves(state.mu), jax.tree.leaves(state.nu)
    steps = jnp.asarray(state.count)
    dtype = at_least_single(*(leaf.dtype for leaf in means))
    b1_left, b2_left = (1 - jnp.asarray(b, dtype) ** steps.astype(dtype) for b in (b1, b2))
    known = steps >= 2
    m = [leaf.astype(dtype) / jnp.where(known, b1_left, 1) for leaf in means]
    s = [leaf.astype(dtype) / jnp.where(known, b2_left, 1) for leaf in squares]
    inverse = 1 / read(GLOBAL_BATCH).astype(dtype)

    def update(weights: jax.Array) -> tuple[jax.Array, MomentNoise]:
        first, second, first_weight, second_weight = weights
        h1 = first / jnp.where(known, first_weight, 1) ** 2
        h2 = second / jnp.where(known, second_weight, 1)
        noise = noise_of_moments(m, s, h1, h2, eps)
        new = jnp.stack(
            [
                b1**2 * first + (1 - b1) ** 2 * inverse,
                b2 * second + (1 - b2) * inverse,
                b1 * first_weight + (1 - b1),
                b2 * second_weight + (1 - b2),
            ]
        )
        return new, MomentNoise(*(jnp.where(known & (h2 > h1), field, jnp.nan) for field in noise))

    return operator_state("moment_noise", np.zeros(4, dtype), update)


def noise_of_moments(m: list[jax.Array], s: list[jax.Array], h1: jax.Array, h2: jax.Array, eps: float) -> MomentNoise:
    """Return the noise scales that follow from unbiased moments and from the noise in them (see above)."""
    spread = jnp.where(h2 > h1, h2 - h1, 1)
    variances = [(square - mean**2) / spread for mean, square in zip(m, s, strict=True)]

    def ratio(scales: list[jax.Array]) -> jax.Array:
        trace = sum(jnp.sum(v / p**2) for v, p in zip(variances, scales, strict=True))
        norms = sum(jnp.sum((mean / p) ** 2) for mean, p in zip(m, scales, strict=True))
        return _positive_ratio(trace, norms - h1 * trace)

    deviations = [jnp.sqrt(jnp.maximum(v, 0)) for v in variances]
    flat = [_sampled([jnp.abs(x) for x in xs]) for xs in (m, deviations)]
    shrunk = _shrinkage(flat[0], flat[1] * jnp.sqrt(h1)) * sum(jnp.sum(jnp.abs(mean)) for mean in m)
    sign = _positive_ratio(sum(jnp.sum(d) for d in deviations), shrunk) ** 2
    return MomentNoise(ratio([jnp.ones_like(x) for x in m]), ratio([jnp.sqrt(x) + eps for x in s]), sign)


def _positive_ratio(noise: Any, signal: Any) -> jax.Array:
    return jnp.where(signal > 0, jnp.maximum(noise, 0) / jnp.where(signal > 0, signal, 1), jnp.inf)


def _sampled(leaves: list[jax.Array]) -> jax.Array:
    """Return every k-th element of all leaves, at most about `_SAMPLE`."""
    stride = -(-sum(leaf.size for leaf in leaves) // _SAMPLE)
    return jnp.concatenate([leaf.reshape(-1)[::stride] for leaf in leaves])


def _shrinkage(means: jax.Array, noise: jax.Array) -> jax.Array:
    """Return c between 0 and 1 with `mean E|N(c means, noise^2)| = mean(means)`, by bisection; `means` >= 0."""
    target = jnp.mean(means)
    safe = jnp.where(noise > 0, noise, 1)

    def expected(c: jax.Array) -> jax.Array:
        x = c * means / safe
        folded = noise * np.sqrt(2 / np.pi) * jnp.exp(-(x**2) / 2) + c * means * jax.lax.erf(x / np.sqrt(2))
        return jnp.mean(jnp.where(noise > 0, folded, c * means))

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) / 2
        above = expected(middle) > target
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    low, high = jax.lax.fori_loop(0, _HALVINGS, halve, (jnp.zeros_like(target), jnp.ones_like(target)))
    return (low + high) / 2


def adam_scale(opt_state: Any, *, b2: float = 0.999, eps: float = 1e-8) -> Any:
    """Return Adam's divisor of gradients, `sqrt(s) + eps`, for `mon.noise_scale(divide_by=…)`.

    Args:
      opt_state: the state of an optax optimizer that contains one state of Adam, before this step's update. Replicated.
      b2, eps: the optimizer's.

    Returns:
      A pytree of the structure and shapes of the gradients, in gradient units. NaN before the first update, which
      `noise_scale` ignores. Replicated.

    Raises:
      CollectiveError: `opt_state` has no state of Adam or several, or `b2` is out of range.

    Example:
      >>> noise = mon.noise_scale(grads, avg_grads, divide_by=mon.adam_scale(opt_state))    # doctest: +SKIP
    """
    start = f"adam_scale{at(current_line())}: "
    if not 0 <= b2 < 1:
        raise CollectiveError(f"{start}b2={b2!r} must be at least 0 and below 1.")
    state = _adam_state(opt_state, start)
    left = 1 - jnp.float32(b2) ** jnp.asarray(state.count).astype(jnp.float32)
    left = jnp.where(left > 0, left, jnp.nan)
    return jax.tree.map(lambda s: jnp.sqrt(s / left.astype(s.dtype)) + eps, state.nu)


class AdamState(NamedTuple):
    """The part of Adam's state that noise scales follow from, as optax names it."""

    count: Any
    mu: Any
    nu: Any


def _adam_state(opt_state: Any, start: str) -> AdamState:
    def is_adam(node: Any) -> bool:
        return all(hasattr(node, name) for name in AdamState._fields) and not isinstance(node, jax.Array)

    found = [node for node in jax.tree.leaves(opt_state, is_leaf=is_adam) if is_adam(node)]
    if len(found) != 1:
        raise CollectiveError(
            f"{start}the optimizer's state must contain the moments of one Adam, but contains {len(found)}. Give the "
            "state of optax.adam, adamw or a chain with one of them."
        )
    return AdamState(found[0].count, found[0].mu, found[0].nu)
