"""`local_mean`: the mean over one worker's own examples, over all its microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax

from adaptive.extend import EXAMPLES, Collective, read

from ._leaves import combine, leaves_of
from ._reduce import problem_of_mean

T = TypeVar("T")


def local_mean(tree: T) -> T:
    """Average values over the examples of this worker, without communication.

    A local batch may run as several microbatches, each of which has its own gradient. `local_mean` returns the gradient
    of the worker's whole batch. A strategy whose workers take steps of their own, such as model averaging, uses it, so
    that its driver runs with kernels of any size and needs no compilation per batch size.

        grads = comm.local_mean(grads)
        updates, opt_state = optimizer.update(grads, opt_state)   # per worker: ad.Program(..., per_worker_state=...)

    Args:
      tree: a pytree of floats and complex numbers. Local.

    Returns:
      `tree` with `sum_c n_c x_c / sum_c n_c` over the calls c of n_c examples. Local: of one worker, the same in all
      its calls. Zeros where the worker has no examples. Of a value that is the same in all of them it is the value. A
      program's `nonfinite=` does not look at it, since it is nobody else's.

    Raises:
      CollectiveError: for leaves of which there is no mean.

    Example:
      >>> import collectives as comm
      >>> print(comm.local_mean(2.5))
      2.5
    """
    leaves = leaves_of("local_mean", tree, problem_of_mean)
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

    def of_replicated(self, x: jax.Array, taking_part: jax.Array) -> jax.Array:
        return x


@dataclass(frozen=True)
class LocalMean(Collective):
    """Collective that averages over the microbatches of one worker."""

    name = "local_mean"
    label = "mean, stays"
    reduces = True
    result_is_replicated = False
    travels = False

    @property
    def weighted(self) -> bool:
        return True

    def of_replicated(self, x: jax.Array, taking_part: jax.Array) -> jax.Array:
        return x
