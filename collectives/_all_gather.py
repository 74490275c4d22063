"""`all_gather`: the values of all workers, on every worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from adaptive.operators.collectives import Collective
from adaptive.operators.eager import with_unknown_rows

from ._leaves import combine, leaves_of

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
