"""The distance of the workers' model replicas from their mean."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import adaptive as ad
from adaptive import CollectiveError
from adaptive.base.process.source_lines import at, current_line
from adaptive.operators.replication_claims import assert_scope
from collectives import all_gather, all_reduce

from ._squares import at_least_single, check_alike, squared_norm

_BUCKETS = 1024
_OWN_REPLICA = "Pass this worker's replica of the parameters:\n    mon.replica_distance(strategy.replica(state))"
_WITHOUT_AVERAGE = "Leave average= out, and it is estimated:\n    mon.replica_distance(params)"


def replica_distance(params: Any, average: Any = None) -> jax.Array:
    """Return the distance of the workers' replicas from their mean, relative to the mean: 0.01 is 1 % of its norm.

        sqrt(sum_i b_i |x_i - xbar|^2 / B) / |xbar|

    over the workers i with b_i of B examples, where x_i is the vector of all parameters and xbar the mean.

    With `average` in place of xbar the result is exact, and adds 4 bytes to a message. Otherwise it is estimated: each
    worker sends a 4 kB sketch of its parameters, in which each element is added to one of 1024 sums, with a sign, both
    at random. The result has a standard deviation of 2.2 %.

    Args:
      params: pytree of floats; this worker's replica. Local.
      average: pytree with the structure and shapes of `params`; the model to compare with, such as
        `strategy.model(state)` of model averaging. Replicated.

    Returns:
      A scalar, without unit; float32 (float64 if parameters are). Replicated. 0 if all replicas are equal, also if all
      are zero; NaN if a replica is not finite.

    Raises:
      CollectiveError: leaves that are not floats, trees of different structure or shapes, or, when the program is
        built, `params` that are replicated or an `average` that is not.

    Example:
      >>> apart = mon.replica_distance(strategy.replica(state), strategy.model(state))            # doctest: +SKIP

    References:
      Charikar, Chen and Farach-Colton 2002, "Finding frequent items in data streams" (the sketch).
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating):
            raise CollectiveError(
                f"replica_distance{at(current_line())}: params{jax.tree_util.keystr(path)} is "
                f"{jnp.asarray(leaf).dtype}, not a float. Pass only the parameters."
            )
    params = assert_scope("local", params, "replica_distance", hint=_OWN_REPLICA)
    # Weighted by the local batch size, not by the size of a microbatch: parameters are the same in all microbatches.
    if average is not None:
        check_alike("replica_distance", params, average)
        average = assert_scope("reduced", average, "replica_distance", hint=_WITHOUT_AVERAGE)
        apart = squared_norm(jax.tree.map(lambda p, a: p - a, params, average))
        return _relative(all_reduce(apart, weight=ad.batch_size()), squared_norm(average))
    sketches, sizes = all_gather((sketch(params, ad.step_number()), ad.batch_size()))
    first = sketches[jnp.argmax(sizes > 0)]
    # Differences from one of the sketches, so that rounding does not separate equal replicas. A worker without examples
    # sends NaN.
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
    """Map all leaves linearly to 1024 numbers whose squared norm has the expectation of the leaves'; shape=(1024,).

    Each element is added to one of the sums with a sign; both are hashes of its index and the seed, and not stored.
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
    """Return a hash of 32-bit numbers in which each bit depends on all bits of `x`: the finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)
