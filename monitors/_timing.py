"""How long this worker's last step took."""

from __future__ import annotations

from operator import attrgetter

import jax
import numpy as np

from adaptive.extend import Source, read

COMPUTE_SECONDS = Source("compute_seconds", attrgetter("compute_seconds"), stand_in=np.nan)
ITERATION_SECONDS = Source("iteration_seconds", attrgetter("iteration_seconds"), stand_in=np.nan)


def compute_seconds() -> jax.Array:
    """Seconds that this worker computed in the previous step: what to balance workers by.

    Waiting for other workers is left out, and so is waiting for input: a worker that waits for a slow one is not slow
    itself. It is of the previous step, since this step's is not known before its message leaves; so it belongs to the
    previous step's batch sizes, `previous_batch_sizes` of the observation that a policy gets.

    Returns:
      A float32 scalar, in seconds. Local: gather it. NaN in the first step, outside a program, and after a step that
      ran beside this process's own compiler on fewer than four cores: that is not how fast the machine is.

    Example:
      >>> seconds = comm.all_gather(mon.compute_seconds())               # doctest: +SKIP
      >>> ctrl.hook(ctrl.balance(), seconds, every=10)                   # doctest: +SKIP

    References:
      The time of Chen et al. 2020, "Semi-dynamic load balancing", which is taken before the barrier.
    """
    return read(COMPUTE_SECONDS)


def iteration_seconds() -> jax.Array:
    """Seconds from the start of the previous step to the start of this one: all of it, input, messages and hooks.

    About the same on all workers, since they wait for one another. For throughput; for balance see `compute_seconds`.

    Returns:
      A float32 scalar, in seconds. Local. NaN in the first step, and outside a program.

    Example:
      >>> slowest = comm.all_reduce(mon.iteration_seconds(), op="max")   # doctest: +SKIP
    """
    return read(ITERATION_SECONDS)
