"""The noise scale from the moments that Adam keeps: no second group, no communication, three metrics.

Adam's moments are weighted means over past steps k of the averaged gradient and its square. Let that gradient have mean
`G_j` and variance `sigma_j^2 / B_k`, independent between steps. With normalized weights u_k of the first moment m and
v_k of the second one s (both without bias), and

    h1 = sum_k u_k^2 / B_k            h2 = sum_k v_k / B_k

the expectations are, for each element j,

    E m_j^2 = G_j^2 + h1 sigma_j^2    E s_j = G_j^2 + h2 sigma_j^2

and so `(s_j - m_j^2) / (h2 - h1)` is an unbiased estimate of `sigma_j^2`, for any steps and batches, as long as G is
constant over the memory of s. While G changes, s - m^2 contains the change, and the noise is overestimated.

The trace could come from s alone, but s reaches back 1,000 steps and more, and a change of G in this time looks like
noise. So steps are taken in blocks of K, long enough for m to forget the block before (b1^K is 4 %). The sum over j of
what a block added to s,

    V = sum_j (s_j - b2^K s'_j) / (1 - b2^K)        with s' before the block, both without correction of the bias

is a weighted mean of the squared norms in the block, with a mean of 1/B of its own in place of h2. Each block then
gives a sample of trace and signal that is nearly independent of the last one, averaged as in `noise_scale`:

    T = (V - |m|^2) / (h2 - h1)         Q = |m|^2 - h1 T

In the metric of Adam, elements are divided by `p_j = sqrt(s_j) + eps`, and in that of the sign `(sum_j sigma_j)^2`
takes the place of the trace. Both need the variance of each element, for which only s over all steps is there; it is
multiplied by T over its own sum, so that it has the trace that is seen within the block. The signal of the sign is
`|m|_1^2 - (2/pi) h1 (sum_j sigma_j)^2` (`_metrics.py`).

The last two have systematic errors: the root of an estimated variance is too small on average, and the signal is
assumed to be distributed like the noise. They are 5 % where the noise is twice the signal, which is more than the
statistical error of a large model. But for any distribution of the signal, and normal noise, with `S = sum_j sigma_j`,

    E sqrt(s_j - m_j^2) <= sqrt(h2 - h1) sigma_j        sigma_j <= sqrt(E s_j / h2)
    E |m|_1 >= |G|_1                                    |G|_1 >= E |m|_1 - sqrt(2 h1 / pi) S

So the lower bound on the sign's noise scale is that of the trace above over `|m|_1^2`, and the upper bound is that of
`S^2 = (sum_j sqrt(s_j))^2 V / (h2 sum_j s_j)` over `(|m|_1 - sqrt(2 h1 / pi) S)^2`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import CollectiveError
from adaptive.base.source_lines import at, current_line
from adaptive.operators.operator_state import operator_state
from adaptive.operators.replication_claims import assert_scope
from adaptive.operators.sources import GLOBAL_BATCH, read

from ._averages import add_sample, packed, unpacked
from ._noise import NoiseScale, summary
from ._squares import at_least_single

_UPDATE_BY_AVERAGES = """Pass the optimizer's state before its update by averaged gradients:
    moments = mon.moment_noise(opt_state)
    avg_grads = comm.all_reduce(grads)
    updates, opt_state = optimizer.update(avg_grads, opt_state, params)"""

_RESIDUE = 0.04  # weight that the first moment gives to gradients before the block
_PAIRS = 5  # of trace and signal: in three metrics, and for the bounds of the last one


class MomentNoise(NamedTuple):
    """Noise scales of one gradient in three metrics, with bounds. Replicated; NaN before the end of the first block."""

    euclidean: NoiseScale
    adam: NoiseScale
    sign: NoiseScale


def moment_noise(
    opt_state: Any,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    decay: float = 0.9,
    confidence: float = 0.95,
) -> MomentNoise:
    """Estimate noise scales from the moments of optax's Adam, for one worker as for many.

    Needs no second group and no communication. Takes a sample of the moments in every `log(0.04) / log(b1)`-th step (31
    for b1 = 0.9), and costs nothing in the steps between. `_moments.py` has the derivation. A change of the gradient
    within that many steps looks like noise. A change within the memory of the second moment, `1 / (1 - b2)` steps, only
    shifts the weight between elements in the metrics of Adam and of the sign.

    The moments are those of the gradients that the optimizer receives, which must be means over the global batch, and
    are clipped ones if it clips them before.

    The bounds in the metric of the sign also contain the error that the unknown distribution of the signal over the
    elements may cause. They are wide, and the upper one is infinite where noise dominates 19 batches (for b1 = 0.9).

    Args:
      opt_state: the state of an optax optimizer that contains one state of Adam (`optax.adam`, `adamw`), before this
        step's update. Replicated.
      b1, b2, eps: the optimizer's. `b2` must be larger than `b1`.
      decay: factor of the weights from one sample to the next, at least 0 and below 1.
      confidence: probability that the bounds enclose the noise scale, between 0 and 1.

    Returns:
      `MomentNoise(euclidean, adam, sign)`: the noise scales for SGD, for Adam, and for methods that use the gradient's
      sign (Lion, Signum), each as a `NoiseScale`. Float32 or better. Replicated. NaN before the first sample.

    Raises:
      CollectiveError: `opt_state` has no state of Adam or several, an option is out of range, or, when the program is
        built, the state is local or that after the step's update.

    Example:
      >>> noise = mon.moment_noise(opt_state, b2=0.99)                            # doctest: +SKIP
      >>> noise.adam.lower, noise.adam.upper                                      # doctest: +SKIP
    """
    start = f"moment_noise{at(current_line())}: "
    if not 0 <= b1 < b2 < 1:
        raise CollectiveError(f"{start}b1={b1!r} and b2={b2!r} must satisfy 0 <= b1 < b2 < 1.")
    if not (0 <= decay < 1 and 0 < confidence < 1):
        raise CollectiveError(
            f"{start}decay={decay!r} must be at least 0 and below 1, and confidence={confidence!r} between 0 and 1."
        )
    state = assert_scope("before", _adam_state(opt_state, start), "moment_noise", hint=_UPDATE_BY_AVERAGES)
    dtype = at_least_single(*(leaf.dtype for leaf in jax.tree.leaves(state.mu)))
    inverse = 1 / read(GLOBAL_BATCH).astype(dtype)

    def update(old: jax.Array) -> tuple[jax.Array, MomentNoise]:
        new = after_step(old, state, inverse, b1=b1, b2=b2, eps=eps, decay=decay)
        return new, noise_of(new, confidence)

    return operator_state("moment_noise", no_blocks(dtype), update)


class MomentWeights(NamedTuple):
    """Sums of the weights of past steps, raw as the moments themselves are. Scalars."""

    first: Any  # of squared weights in the first moment, over the batch
    second: Any  # of weights in the second moment, over the batch
    first_total: Any  # of weights in the first moment

    def after_step(self, inverse: Any, b1: float, b2: float) -> MomentWeights:
        """Return the sums after one more update by a mean over `1 / inverse` examples."""
        return MomentWeights(
            b1**2 * self.first + (1 - b1) ** 2 * inverse,
            b2 * self.second + (1 - b2) * inverse,
            b1 * self.first_total + (1 - b1),
        )


class Block(NamedTuple):
    """What is known from the beginning of a block of steps. Scalars."""

    wait: Any  # steps until it ends
    begun: Any  # 1; 0 before the first block
    squares: Any  # sum of the raw second moment at its beginning
    second: Any  # `MomentWeights.second` at its beginning


def no_blocks(dtype: Any) -> np.ndarray:
    """Return the state before the first step."""
    return np.zeros(len(MomentWeights._fields) + len(Block._fields) + _PAIRS * 7, dtype)


def noise_of(state: jax.Array, confidence: float) -> MomentNoise:
    """Return the noise scales that follow from the averages in the state."""
    noise = jax.vmap(lambda row: summary(unpacked(row), confidence))(state[7:].reshape(_PAIRS, 7))
    euclidean, adam, sign, least, most = (NoiseScale(*(field[i] for field in noise)) for i in range(_PAIRS))
    return MomentNoise(euclidean, adam, sign._replace(lower=least.lower, upper=most.upper))


def after_step(
    state: jax.Array, adam: AdamState, inverse: jax.Array, *, b1: float, b2: float, eps: float, decay: float
) -> jax.Array:
    """Return the state after one step: at the end of a block, with a further sample in the averages.

    Args:
      adam: the moments before the step's update.
      inverse: one over the batch of the update that follows.
    """
    length = block_length(b1)
    weights, block, averages = MomentWeights(*state[:3]), Block(*state[3:7]), state[7:].reshape(_PAIRS, 7)
    due = block.wait <= 0
    left = b2**length

    def at_end() -> jax.Array:
        squares = sum(jnp.sum(leaf.astype(state.dtype)) for leaf in jax.tree.leaves(adam.nu))
        added = (squares - left * block.squares) / (1 - left)
        inverse_batch = (weights.second - left * block.second) / (1 - left)
        return jnp.append(_samples(adam, weights, added, inverse_batch, b1=b1, b2=b2, eps=eps).ravel(), squares)

    found = jax.lax.cond(due, at_end, lambda: jnp.append(jnp.full(2 * _PAIRS, jnp.nan, state.dtype), block.squares))
    samples = jnp.where(block.begun > 0, found[:-1].reshape(_PAIRS, 2), jnp.nan)
    averages = jax.vmap(lambda row, sample: packed(add_sample(unpacked(row), sample, decay)))(averages, samples)
    begun = Block(jnp.asarray(length, state.dtype), jnp.ones_like(block.begun), found[-1], weights.second)
    block = jax.tree.map(lambda new, old: jnp.where(due, new, old), begun, block)
    block = block._replace(wait=block.wait - 1)
    return jnp.concatenate([jnp.stack([*weights.after_step(inverse, b1, b2), *block]), averages.ravel()])


def block_length(b1: float) -> int:
    """Return the number of steps after which the first moment has forgotten all but 4 % of what was before."""
    return max(2, int(np.ceil(np.log(_RESIDUE) / np.log(b1)))) if b1 > 0 else 2


def _samples(
    adam: AdamState, weights: MomentWeights, added: jax.Array, h2: jax.Array, *, b1: float, b2: float, eps: float
) -> jax.Array:
    """Return trace and signal in each metric and for the bounds of the last one, from one block; shape=(5, 2).

    Args:
      added: the weighted mean of the squared norms of the block's gradients.
      h2: the weighted mean of 1/B over the block.
    """
    dtype, steps = added.dtype, jnp.asarray(adam.count).astype(added.dtype)
    h1 = weights.first / weights.first_total**2
    # Both moments have the weight of all steps, of which the operator may have seen the last ones only.
    m = [leaf.astype(dtype) / (1 - b1**steps) for leaf in jax.tree.leaves(adam.mu)]
    s = [leaf.astype(dtype) / (1 - b2**steps) for leaf in jax.tree.leaves(adam.nu)]
    spread = [jnp.maximum(square - mean**2, 0) for mean, square in zip(m, s, strict=True)]

    def total(function: Callable[..., jax.Array], *trees: list[jax.Array]) -> jax.Array:
        return sum((jnp.sum(function(*leaves)) for leaves in zip(*trees, strict=True)), jnp.zeros((), dtype))

    norm = total(jnp.square, m)
    trace = (added - norm) / (h2 - h1)
    share = trace / total(lambda v: v, spread)  # of an element's variance over all steps
    of_adam = share * total(lambda v, square: v / (jnp.sqrt(square) + eps) ** 2, spread, s)
    divided = total(lambda mean, square: (mean / (jnp.sqrt(square) + eps)) ** 2, m, s)
    of_sign = share * total(jnp.sqrt, spread) ** 2
    magnitude = total(jnp.abs, m)
    most = total(jnp.sqrt, s) ** 2 * added / (h2 * total(lambda square: square, s))
    least_magnitude = magnitude - jnp.sqrt(2 / np.pi * h1 * most)
    rows = [
        [trace, norm - h1 * trace],
        [of_adam, divided - h1 * of_adam],
        [of_sign, magnitude**2 - 2 / np.pi * h1 * of_sign],
        [of_sign, magnitude**2],
        [most, least_magnitude * jnp.abs(least_magnitude)],  # negative if noise explains m
    ]
    return jnp.stack([jnp.stack(row) for row in rows])


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
            f"{start}the optimizer's state must contain the moments of one Adam, but contains {len(found)}. Pass the "
            "state of optax.adam, adamw or a chain with one of them."
        )
    return AdamState(found[0].count, found[0].mu, found[0].nu)
