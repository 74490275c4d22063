"""Exact means over a data set, over all workers: no example twice, none left out, whatever the last batch's size."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import numpy as np

from ._data import Rows
from ._errors import DriverError
from ._world import World

# What one process found: how many examples, and sums over them in double precision (None where it had none).
Sums = tuple[int, Any]


def evaluate(fn: Callable, states: Sequence[Any], data: Rows, world: World, batch: int) -> Any:
    """Means of `fn(state, batch)` over `data`, weighted by examples.

    Args:
      states: the user's state on the device of each worker of this process.
      batch: examples in one call; the last one may be smaller.

    Returns:
      A pytree of numpy arrays. Replicated, to the last bit.
    """
    call = jax.jit(fn)
    pending = []
    for number, start in enumerate(range(0, len(data), batch)):
        worker = number % world.size
        if worker not in world.workers:
            continue
        local = worker - world.workers.start
        stop = min(start + batch, len(data))
        rows = jax.device_put(data.rows(np.arange(start, stop)), world.devices[local])
        pending.append((stop - start, call(states[local], rows)))
    mine = reduce(
        _add, ((n, jax.tree.map(lambda v, n=n: np.asarray(v, np.float64) * n, m)) for n, m in pending), (0, None)
    )
    everyone = [pickle.loads(other) for other in world.share(pickle.dumps(mine))]
    examples, sums = reduce(_add, everyone, (0, None))
    assert examples == len(data)
    return jax.tree.map(lambda s: s / examples, sums)


def _add(a: Sums, b: Sums) -> Sums:
    if a[1] is None or b[1] is None:
        return (a[0] + b[0], a[1] if b[1] is None else b[1])
    try:
        return a[0] + b[0], jax.tree.map(_add_leaves, a[1], b[1])
    except ValueError as error:
        raise DriverError(f"evaluate: {error}") from None


def _add_leaves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.shape != b.shape:
        raise ValueError(
            f"fn's results have shape {a.shape} for one batch and {b.shape} for another. They must be means over the "
            "batch's examples:  jnp.mean(correct)"
        )
    return a + b
