"""`broadcast`: the values of one worker, on every worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from adaptive.base.values.numbers import whole
from adaptive.operators.collectives import Collective

from ._leaves import combine, error, known_capacity, leaves_of

T = TypeVar("T")


def broadcast(tree: T, root: int = 0) -> T:
    """Copy the values of one worker to every worker.

    Sends the leaves' bytes; the other workers contribute zeros.

    Args:
      tree: a pytree of arrays and numbers, each of the same shape on all workers. Local.
      root: number of the worker whose values are copied. It must have examples in this step.

    Returns:
      `tree` with the root's leaves. Replicated.

    Raises:
      CollectiveError: a leaf cannot be sent, or there is no worker `root`.

    Example:
      >>> import jax, collectives as comm
      >>> order = comm.broadcast(jax.random.permutation(jax.random.key(0), 4))
      >>> sorted(order.tolist())
      [0, 1, 2, 3]
    """
    number, workers = whole(root), known_capacity()
    if number is None:
        raise error("broadcast", f"root={root!r} must be an integer known while tracing: a worker's number.")
    if number < 0 or (workers is not None and number >= workers):
        there = "workers are numbered from 0" if workers is None else f"the workers are 0 to {workers - 1}"
        raise error("broadcast", f"there is no worker root={number!r}: {there}.")
    return combine(Broadcast(number), tree, leaves_of("broadcast", tree))


@dataclass(frozen=True)
class Broadcast(Collective):
    """Collective that broadcasts: the root contributes its value, and the others zeros."""

    root: int = 0

    name = "broadcast"

    def encode(self, x: jax.Array, worker: Any, capacity: int) -> jax.Array:
        return jnp.where(worker == self.root, x, jnp.zeros((), x.dtype))

    @property
    def needed(self) -> tuple[int, ...]:
        return (self.root,)

    @property
    def about(self) -> str:
        return f"broadcast from {self.root}"
