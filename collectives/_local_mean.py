"""`local_mean`: the mean over one worker's own examples, whatever kernel calls its batch runs as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import jax

from adaptive.extend import EXAMPLES, Collective, read

from ._leaves import combine, leaves_of
from ._reduce import problem_of_mean

T = TypeVar("T")


def local_mean(tree: T) -> T:
    """Average values over the examples of this worker alone. Nothing is sent.

    A local batch may run as several kernel calls, and then each has a gradient of its own. This is the gradient of the
    worker's whole batch: what a step that a worker takes by itself goes by, as in model averaging, so that its driver
    runs with kernels of any size, and none has to be compiled for each size of a batch.

        grads = comm.local_mean(grads)
        updates, opt_state = optimizer.update(grads, opt_state)       # of this worker's own: ad.Program(...,
        per_worker_state=...)

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
    """Arrays by name, added up over the kernel calls of this worker."""
    return combine(LocalSum(), leaves, leaves)


@dataclass(frozen=True)
class LocalSum(Collective):
    """A sum over the calls of one worker."""

    name = "local_sum"
    label = "sum, stays"
    reduces = True
    result_is_replicated = False
    travels = False

    def of_replicated(self, x: jax.Array, taking_part: jax.Array) -> jax.Array:
        return x


@dataclass(frozen=True)
class LocalMean(Collective):
    """A mean over the calls of one worker."""

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
