"""Custom reductions (`Sliced` and `Mixed`) over several devices, traced inside a `shard_map` over the workers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive.base.reductions import Mixed, Sliced, summed_statistics


def by_slices(op: Sliced, x: jax.Array, step: Any, axis: str) -> jax.Array:
    """Return a part, reduced by a `Sliced` reduction: each device reduces one slice, and all gather the slices."""
    workers, number = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    sent = op.sent(x.reshape(-1), step, number)
    sent = jnp.pad(sent, (0, -len(sent) % (workers * op.granule))).reshape(workers, -1)
    rows = jax.lax.all_to_all(sent, axis, 0, 0)
    statistics = summed_statistics(op, rows, number == 0, lambda found: jax.lax.psum(found, axis))
    slices = jax.lax.all_gather(op.reduced(rows, statistics, step, number), axis)
    return slices.reshape(-1)[: x.size].astype(x.dtype).reshape(x.shape)


def mixed(x: jax.Array, weights: jax.Array, axis: str) -> jax.Array:
    """Return a worker's weighted mean of all workers' values.

    Args:
      x: this worker's value.
      weights: the weights of all workers' means, a row per worker; see `table`.
      axis: name of the mesh axis of the workers.
    """
    values = jax.lax.all_gather(x, axis)
    own = weights[jax.lax.axis_index(axis)].astype(x.dtype)
    terms = [jnp.where(own[i] > 0, own[i] * values[i], jnp.zeros((), x.dtype)) for i in range(len(values))]
    return reduce(jnp.add, terms)


def table(op: Mixed, step: int, members: Sequence[int], workers: int) -> np.ndarray:
    """Return the weights of all workers' means in a step; shape=(workers, workers). Non-members keep their value."""
    found, table = op.weights(step, members), np.eye(workers)
    for worker, weights in found.items():
        table[worker] = 0
        table[worker, list(weights)] = list(weights.values())
    return table
