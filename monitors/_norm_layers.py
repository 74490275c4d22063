"""Squared gradient norms of single examples, estimated from those of the norm layers.

The gradients of norm layers (LayerNorm, RMSNorm, GroupNorm) have cheap norms, and these rise and fall with the norm of
the whole gradient from example to example (Gray et al. 2024). With r_b for the squared norm over the norm layers, and
f_bl for the one of another leaf l,

    c_l = <f_bl> / <r_b>          f_bl is estimated as c_l r_b

where the means are over the examples of the steps in which both are computed: the first step, further ones at intervals
that double, and each k-th step from then on. Sums over the examples of the last eight such steps are operator state.
They weigh a measurement by 0.7 for each later one.

All estimates between two measurements share the error of the ratio. With F_k for the sum over a measurement's examples
of the norms of the leaves at hand, R_k for that of the norm layers, and w_k for its weight, its variance is

    Var c = sum_k w_k^2 (F_k - c R_k)^2 / (sum_k w_k R_k)^2 / (1 - 2 W3 / (W1 W2) + W2 / W1^2)        Wi = sum_k w_k^i

with `W1^2 / W2 - 1` degrees of freedom. The last factor is (n - 1) / n for n equal weights. Changes of the ratio from
one measurement to the next are contained in the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import CollectiveError
from adaptive.operators.operator_state import operator_state
from collectives import all_reduce

from ._example_trace import Use
from ._squares import at_least_single

_KEEP = 0.7  # weight of a measurement of the ratios, relative to the one after it
_KEPT = 8  # number of measurements; an older one would have a weight of 0.02


@partial(jax.tree_util.register_dataclass, data_fields=["norms", "measured"], meta_fields=["own"])
@dataclass(frozen=True)
class EstimatedNorms:
    """Squared gradient norms of single examples that are partly estimated, for `noise_scale(per_example=…)`.

    Attributes:
      norms: pytree of the structure of the parameters; each leaf has shape=(examples,), in gradient units squared.
        Local.
      measured: sums over all examples of each leaf's norms, in the last steps in which all were computed, the latest
        first, 0 where there are none; shape=(8, leaves). Replicated.
      own: indices of the leaves of norm layers, whose norms are always computed.
    """

    norms: Any
    measured: jax.Array
    own: tuple[int, ...]


class RatioError(NamedTuple):
    """The error of the estimated part of a sum of norms. Scalars; replicated."""

    deviation: jax.Array  # standard deviation, relative to the whole sum
    dof: jax.Array  # degrees of freedom with which it is known


def ratio_weights(measured: jax.Array, own: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Return each measurement's weight and its sum over the norm layers, R_k; both of shape=(8,)."""
    of_norm_layers = measured[:, np.array(own)].sum(1)
    return jnp.where(of_norm_layers > 0, _KEEP ** np.arange(_KEPT), 0).astype(measured.dtype), of_norm_layers


def after_measurement(measured: jax.Array, sums: jax.Array) -> jax.Array:
    """Return the measurements with a further one, of shape=(leaves,), in place of the oldest."""
    return jnp.concatenate([sums[None], measured[:-1]])


def ratio_error(measured: jax.Array, own: Sequence[int], leaves: Sequence[int]) -> RatioError:
    """Return the error of a sum of norms over some leaves that comes from the ratios.

    Args:
      measured, own: as in `EstimatedNorms`.
      leaves: indices of the leaves that are summed.
    """
    weights, of_norm_layers = ratio_weights(measured, own)
    estimated = measured[:, np.array([i for i in leaves if i not in own], int)].sum(1)
    whole, base = (weights * measured[:, np.array(leaves)].sum(1)).sum(), (weights * of_norm_layers).sum()
    residual = estimated - (weights * estimated).sum() / base * of_norm_layers
    first, second, third = ((weights**i).sum() for i in (1, 2, 3))
    known = first**2 > 1.5 * second
    dof = jnp.where(known, first**2 / second - 1, 0.1)  # fewer than two measurements: nothing is known
    left = jnp.where(known, 1 - 2 * third / (first * second) + second / first**2, 1)
    deviation = jnp.sqrt((weights * residual) @ (weights * residual) / left) / whole
    return RatioError(jnp.where(known, deviation, (weights * estimated).sum() / whole), dof)


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
) -> tuple[list[jax.Array], jax.Array]:
    """Return each leaf's squared norms, shape=(examples,): computed in every `every`-th step, estimated in between.

    Also returns the measurements, as in `EstimatedNorms`.

    Args:
      compute: returns the squared norms of the leaves with these indices.
      compute_afresh: does the same by another evaluation of the loss, which then takes parameters and batch as operands
        of the conditional. Values within the first one as operands cost a fourth of a step in each step.
      own: the norm layers' leaves, whose norms are computed in each step.
    """
    others = [index for index in range(n_leaves) if index not in own]
    of_own = compute(own)
    dtype = at_least_single(*(squares.dtype for squares in of_own))
    own_rows = jnp.stack([squares.astype(dtype) for squares in of_own])
    rows = jnp.sum(own_rows, 0)
    if not others:
        return of_own, jnp.ones((_KEPT, n_leaves), dtype)

    def update(state: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        wait, interval, kept = state[0], state[1], state[2:].reshape(_KEPT, n_leaves)
        due = wait <= 0

        def whole() -> jax.Array:
            return jnp.stack([squares.astype(dtype) for squares in compute_afresh(others)])

        def ratios() -> jax.Array:
            weights, base = ratio_weights(kept, own)
            total = weights @ base
            return (weights @ kept[:, np.array(others)] / jnp.where(total > 0, total, jnp.nan))[:, None] * rows[None]

        squares = jax.lax.cond(due, whole, ratios)
        measured = jnp.concatenate([jnp.sum(own_rows, 1), jnp.sum(squares, 1)])[np.argsort([*own, *others])]
        # Sums that are not finite would skip the step, even if the driver drops such gradients.
        measured = all_reduce(jnp.where(due & jnp.isfinite(measured).all(), measured, 0), op="sum")
        next_interval = jnp.where(due, jnp.minimum(2 * interval, every), interval)
        times = jnp.stack([jnp.where(due, interval, wait) - 1, next_interval])
        known = due & (measured[np.array(own)].sum() > 0)
        latest = jnp.where(known, after_measurement(kept, measured), kept)
        return jnp.concatenate([times, latest.ravel()]), (squares, latest)

    start = np.zeros(2 + _KEPT * n_leaves, dtype)
    start[1] = 1
    squares, kept = operator_state("example_norms", start, update)
    found = dict(zip(own, of_own, strict=True)) | dict(zip(others, squares, strict=True))
    return [found[index] for index in range(n_leaves)], kept


def no_norm_layers(start: str) -> CollectiveError:
    """Return the error of a model without norm layers."""
    return CollectiveError(
        f"{start}full_every= estimates norms from those of norm layers in between, but no parameter multiplies the "
        "values of examples elementwise, as the scale of a norm layer does. Leave out full_every= to compute the norms "
        "of all layers in each step, or compute those of a few examples: example_norms(loss_fn, sample=4)."
    )
