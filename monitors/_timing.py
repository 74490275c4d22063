"""The duration of this worker's previous step."""

from __future__ import annotations

from operator import attrgetter

import jax
import numpy as np

from adaptive.operators.sources import Source, read

COMPUTE_SECONDS = Source("compute_seconds", attrgetter("compute_seconds"), stand_in=np.nan)
ITERATION_SECONDS = Source("iteration_seconds", attrgetter("iteration_seconds"), stand_in=np.nan)


def compute_seconds() -> jax.Array:
    """Return the seconds that this worker computed in the previous step, for balancing the workers.

    Waiting for other workers and for input is not included. The value belongs to the previous step's batch sizes,
    `previous_batch_sizes` of the observation that a policy gets.

    Returns:
      A float32 scalar, in seconds. Local; use `all_gather` to compare workers. NaN in the first step, outside a
      program, and after a step during which this process compiled on fewer than four cores, which slows the step.

    Example:
      >>> seconds = comm.all_gather(mon.compute_seconds())               # doctest: +SKIP
      >>> ctrl.hook(ctrl.balance(), seconds, every=10)                   # doctest: +SKIP

    References:
      Chen et al. 2020, "Semi-dynamic load balancing" (its time is measured before the barrier, too).
    """
    return read(COMPUTE_SECONDS)


def iteration_seconds() -> jax.Array:
    """Return the seconds from the start of the previous step to the start of this one, with input, messages and hooks.

    About the same on all workers, since they wait for one another. Measures throughput; for balancing use
    `compute_seconds`.

    Returns:
      A float32 scalar, in seconds. Local. NaN in the first step, and outside a program.

    Example:
      >>> slowest = comm.all_reduce(mon.iteration_seconds(), op="max")   # doctest: +SKIP
    """
    return read(ITERATION_SECONDS)
