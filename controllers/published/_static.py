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
from adaptive.operators.sources import Reading, Source, read
from controllers._policy import Policy


def _count_cores(reading: Reading) -> float:
    del reading
    return len(allowed_cpus())


CORES = Source("cores", _count_cores, stand_in=1.0)


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

    def update(observation: Observation, state: tuple[()]) -> tuple[Decision | None, tuple[()]]:
        if not observation.due:
            return None, state
        sizes = split(observation.global_batch, _capacities(observation, capacities).tolist(), observation.limits)
        if sizes == observation.batch_sizes:
            return None, state
        return Decision(shares=tuple(map(float, sizes))), state

    def check(values: tuple[Any, ...], n_workers: int, name: str) -> None:
        del name
        _check(capacities if capacities is not None else values[0] if values else None, n_workers)

    return Policy(lambda n_workers: (), update, "static_proportional", ("capacities",), check)


def _capacities(observation: Observation, given: Sequence[float] | None) -> np.ndarray:
    value = given if given is not None else observation.values[0] if observation.values else None
    _check(value, len(observation.batch_sizes))
    return np.asarray(value, np.float64)


def _check(value: Any, n: int) -> None:
    if value is None or np.shape(value) != (n,):
        got = f"shape {value.shape}" if hasattr(value, "shape") else repr(value)
        raise DriverError(
            f"static_proportional needs {n} capacities, one per worker; got {got}. Pass them, or gather them:\n"
            f"    ctrl.hook(ctrl.published.static_proportional(), comm.all_gather(ctrl.published.cores()))"
        )
