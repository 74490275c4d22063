"""`all_gather` and `broadcast`: the values of all workers, or of one, on every worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from adaptive.base.numbers import brief, whole
from adaptive.operators.collectives import Collective
from adaptive.operators.eager import with_unknown_rows

from ._leaves import combine, error, known_capacity, leaves_of

T = TypeVar("T")


def all_gather(tree: T) -> T:
    """Gather the values of all workers on every worker.

    Each worker writes its values into one row of an array of zeros, and the arrays are summed. A leaf therefore sends
    its bytes times the number of workers. Meant for scalars and small arrays, such as each worker's seconds.

    Args:
      tree: a pytree of arrays and numbers, each of the same shape on all workers. Local.

    Returns:
      `tree` with each leaf of shape `(capacity, *shape)`: row i holds the values of worker i. Rows of empty worker
      slots, and of workers without examples in this step, are NaN (0 in integer arrays). Replicated.

    Raises:
      CollectiveError: a leaf cannot be sent.

    Example:
      >>> import collectives as comm
      >>> print(comm.all_gather(2.5))  # outside a program: one worker
      [2.5]
    """
    return combine(Gather(), tree, leaves_of("all_gather", tree))


@dataclass(frozen=True)
class Gather(Collective):
    """Collective that gathers: each worker fills its row of an array of zeros, and the arrays are summed."""

    name = "all_gather"
    label = "gather"
    shows_workers = True

    def result_shape(self, shape: tuple[int, ...], capacity: int) -> tuple[int, ...]:
        return (capacity, *shape)

    sent_shape = result_shape

    def encode(self, x: jax.Array, worker: Any, capacity: int) -> jax.Array:
        row = (jnp.arange(capacity, dtype=jnp.int32) == worker).reshape((-1,) + (1,) * x.ndim)
        return jnp.where(row, x[None], jnp.zeros((), x.dtype))

    def of_replicated(self, x: jax.Array, taking_part: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(x, self.result_shape(x.shape, len(taking_part)))
        return with_unknown_rows(self, rows, x.shape, taking_part)

    def result_axis(self, axis: int) -> int:
        return axis + 1


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
        raise error("broadcast", f"there is no worker root={brief(number)}: {there}.")
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
