"""`static_proportional`: batches in proportion to the machines' capacities, set once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from adaptive import DriverError
from adaptive.base.decision import Decision, Observation
from adaptive.base.process.cores import allowed_cpus
from adaptive.base.split import split
from adaptive.operators.sources import Source, read
from controllers._policy import Policy, stateless

CORES = Source("cores", lambda reading: len(allowed_cpus()), stand_in=1.0)


def cores() -> jax.Array:
    """Return the number of cores that this worker's process may run on. A float32 scalar; local; 1 outside a program.

    Example:
      >>> ctrl.hook(ctrl.published.static_proportional(), comm.all_gather(ctrl.published.cores()))     # doctest: +SKIP
    """
    return read(CORES)


def static_proportional(capacities: Sequence[float] | None = None) -> Policy:
    """Return a policy that splits the global batch in proportion to given capacities, before anything is measured.

        b_k = B X_k / sum_i X_i

    Args:
      capacities: X, one per worker: cores if all workers compute on CPUs, half-precision FLOPS if some have
        accelerators. By default the hook's value, which must be equal on all workers, such as a gathered `cores()`.

    Returns:
      A policy for a hook with no values, or with one of shape=(n,).

    References:
      Tyagi & Sharma 2020, "Taming Resource Heterogeneity in Distributed ML Training with Dynamic Batching", section
      III-B. (It prints b_0 X_k / sum X, which would sum to one worker's batch; meant is the sum K b_0.)
    """

    def decide(observation: Observation) -> Decision | None:
        given = np.asarray(observation.values[0] if capacities is None else capacities, np.float64)
        given = np.where(observation.limits.arrays.upper > 0, given, 0.0)  # empty worker slots have none
        sizes = split(observation.global_batch, given, observation.limits)
        return None if sizes == observation.batch_sizes else Decision(shares=tuple(map(float, sizes)))

    def check(values: tuple[Any, ...], n_workers: int, name: str) -> None:
        given: Any = next(iter(values), None) if capacities is None else capacities
        if given is None or np.shape(given) != (n_workers,):
            got = f"shape {given.shape}" if hasattr(given, "shape") else repr(given)
            raise DriverError(
                f"{name} needs {n_workers} capacities, one per worker; got {got}. Pass them, or gather them:\n"
                f"    ctrl.hook(ctrl.published.static_proportional(), comm.all_gather(ctrl.published.cores()))"
            )

    return stateless(decide, "static_proportional", reads=("capacities",), check=check)
