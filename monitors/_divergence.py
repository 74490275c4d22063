"""How far replicas of a model are apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import adaptive as ad
from adaptive import CollectiveError
from adaptive.extend import assert_scope, at, current_line
from collectives import all_gather, all_reduce

from ._squares import at_least_single, check_alike, squared_norm

_BUCKETS = 1024


def divergence(params: Any, average: Any = None) -> jax.Array:
    """How far the workers' replicas are from their mean: 0.01 is 1 % of the mean's length.

        sqrt(sum_i b_i |x_i - xbar|^2 / B) / |xbar|

    over the workers, with b_i examples of B; all leaves are one vector.

    With `average` that is exact (with it in the place of xbar), for 4 bytes on a message. Without, nobody has the mean,
    and it is estimated: each worker sends a sketch of its parameters, 4 kB, in which each element is added to one of
    1024 sums, with a sign, both at random. Sketches of differences are the differences of sketches, and their squared
    lengths are unbiased, with a standard deviation of at most 4.5 %; 2.2 % of the result. Which sum and which sign are
    drawn anew in each step, so `mon.ema` of it has less. A pass over the parameters in each step either way.

    Args:
      params: pytree of floats; this worker's replica. Local.
      average: pytree; what they are compared with: `strategy.model(state)` of model averaging. Replicated.

    Returns:
      A scalar of float32 (float64 if parameters are). Replicated. 0 where all are alike, also where all are zero; NaN
      where a replica is not finite.

    Raises:
      CollectiveError: leaves that are no floats, trees of different shapes, or, when the program is built, `params`
        that are replicated, or an `average` that is not.

    Example:
      >>> apart = mon.divergence(strategy.replica(state), strategy.model(state))            # doctest: +SKIP

    References:
      Charikar, Chen and Farach-Colton 2002, "Finding frequent items in data streams", of the sketch.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            raise CollectiveError(
                f"divergence{at(current_line())}: params{jax.tree_util.keystr(path)} is {jnp.asarray(leaf).dtype}, and "
                "no float. Give the parameters alone."
            )
    params = assert_scope("local", params, "divergence")
    # The local batch's size, and not that of a call: parameters are the same in all calls.
    if average is not None:
        check_alike("divergence", params, average)
        average = assert_scope("reduced", average, "divergence")
        apart = squared_norm(jax.tree.map(lambda p, a: p - a, params, average))
        return _relative(all_reduce(apart, weight=ad.batch_size()), squared_norm(average))
    sketches, sizes = all_gather((sketch(params, ad.step()), ad.batch_size()))
    first = sketches[jnp.argmax(sizes > 0)]
    # From one of them, so that replicas that are alike are not apart by rounding. Who has no examples sends NaN.
    away = jnp.where((sizes > 0)[:, None], sketches - first[None], jnp.zeros((), first.dtype))
    examples = sizes.astype(away.dtype)  # a sum of int32 is int64 in double precision
    shares = examples / examples.sum()
    to_mean = shares @ away
    apart = shares @ ((away - to_mean[None]) ** 2).sum(1)
    return _relative(apart, (first + to_mean) @ (first + to_mean))


def _relative(apart: jax.Array, length: jax.Array) -> jax.Array:
    alike = apart == 0
    return jnp.sqrt(jnp.where(alike, apart, apart / jnp.where(alike, jnp.ones((), length.dtype), length)))


def sketch(params: Any, seed: jax.Array) -> jax.Array:
    """A linear map of all leaves to 1024 numbers, by which squared lengths are right on average. shape=(1024,)

    Which sum an element is added to, and by which sign, follows from its place and the seed, and is kept nowhere.
    """
    leaves = [jnp.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(params)]
    dtype = at_least_single(*(leaf.dtype for leaf in leaves))
    total = jnp.zeros(_BUCKETS, dtype)
    for number, leaf in enumerate(leaves):
        key = _mixed(seed.astype(jnp.uint32) + _mixed(jnp.uint32(number + 1)))
        bits = _mixed(_mixed(jax.lax.iota(jnp.uint32, leaf.size) + key))
        bucket, odd = (bits & jnp.uint32(_BUCKETS - 1)).astype(jnp.int32), (bits >> 31) == 1
        value = leaf.astype(dtype)
        total = total + jax.ops.segment_sum(jnp.where(odd, -value, value), bucket, _BUCKETS)
    return total


def _mixed(x: jax.Array) -> jax.Array:
    """Bits of a 32-bit number, each of which follows all bits of `x`: the end of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
