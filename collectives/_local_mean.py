"""`local_mean`: the mean over one worker's own examples, over all its microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax

from adaptive.operators.collectives import Collective
from adaptive.operators.sources import EXAMPLES, read

from ._leaves import combine, leaves_of
from ._reduce import problem_of

T = TypeVar("T")


def local_mean(tree: T) -> T:
    """Average values over the examples of this worker, without communication.

    A local batch may run as several microbatches, each with its own gradient. `local_mean` returns the gradient of the
    worker's whole batch. Use it where each worker takes optimizer steps of its own, as in model averaging: such a
    driver can then run in microbatches, and a new batch size needs no compilation.

        grads = comm.local_mean(grads)
        updates, opt_state = optimizer.update(grads, opt_state)   # per worker: ad.Program(..., per_worker_state=...)

    Args:
      tree: a pytree of floats and complex numbers. Local.

    Returns:
      `tree` with `sum_c n_c x_c / sum_c n_c` over the worker's microbatches c of n_c examples; zeros if the worker has
      no examples. Local, and the same in all microbatches of a worker. A program's `nonfinite=` does not check it.

    Raises:
      CollectiveError: a leaf cannot be averaged.

    Example:
      >>> import collectives as comm
      >>> print(comm.local_mean(2.5))
      2.5
    """
    leaves = leaves_of("local_mean", tree, problem_of)
    return combine(LocalMean(), tree, leaves, weight=read(EXAMPLES)) if leaves else tree


def local_sum(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return named arrays, summed over the microbatches of this worker."""
    return combine(LocalSum(), leaves, leaves)


@dataclass(frozen=True)
class LocalSum(Collective):
    """Collective that sums over the microbatches of one worker."""

    name = "local_sum"
    label = "sum, stays"
    reduces = True
    result_is_replicated = False
    travels = False


@dataclass(frozen=True)
class LocalMean(LocalSum):
    """Collective that averages over the microbatches of one worker."""

    name = "local_mean"
    label = "mean, stays"

    @property
    def weighted(self) -> bool:
        return True
