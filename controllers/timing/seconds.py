"""Checks and conversions of the hook values that policies read: seconds, and inputs per worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptive import DriverError
from adaptive.base.decision import Observation


def check_times(values: Sequence[Any], n_workers: int, policy: str, *, n_inputs: int | None = None) -> None:
    """Check the values of a policy that reads seconds and further numbers per worker; used as `Policy.check`.

    Raises:
      DriverError: the first value is missing or no time per worker; or another one has another shape.
      ValueError: there are fewer or more further values than `n_inputs`.
    """
    write = f"    seconds = comm.all_gather(mon.compute_seconds())\n    ctrl.hook(ctrl.{policy}(), seconds)"
    if not values or shape_of(values[0]) != (n_workers,):
        got = f"shape {shape_of(values[0])}" if values else "nothing"
        raise DriverError(
            f"{policy} reads one time per worker, shape ({n_workers},); it received {got}. Gather them:\n{write}"
        )
    if getattr(values[0], "sources", frozenset()) == {"iteration_seconds"}:
        raise DriverError(
            f"{policy} reads the seconds that each worker computed; it received those of the whole step "
            f"(iteration_seconds), which are equal on all workers, because all wait for the slowest. Write:\n{write}"
        )
    further = values[1:]
    if n_inputs is not None and len(further) != n_inputs:
        raise ValueError(
            f"{policy} was created for {n_inputs} inputs after the times, and received {len(further)}. Create it with "
            f"n_inputs={len(further)}, and a predictor that reads them, such as arx()."
        )
    for value in further:
        if shape_of(value) != (n_workers,):
            raise DriverError(
                f"{policy} reads one number per worker, shape ({n_workers},), after the times; it received shape "
                f"{shape_of(value)}. Gather them:  comm.all_gather(mon.cpu_available())"
            )


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array, a number or an abstract value; `()` for other objects."""
    return np.shape(value) if hasattr(value, "shape") or not isinstance(value, tuple) else ()


def seconds_of(observation: Observation) -> np.ndarray:
    """Return the hook's first value, a number per worker; shape=(n,)."""
    return np.asarray(observation.values[0], np.float64)


def inputs_of(observation: Observation) -> np.ndarray:
    """Return the hook's further values; shape=(n, number of values)."""
    further = [np.asarray(value, np.float64) for value in observation.values[1:]]
    return np.stack(further, axis=1) if further else np.zeros((len(observation.batch_sizes), 0))


def active_of(observation: Observation) -> np.ndarray:
    """Return the indices of the active workers, which take examples. int64, shape=(their number,)."""
    return observation.limits.arrays.active


def shares_of(split: np.ndarray, active: np.ndarray, n_workers: int) -> tuple[float, ...]:
    """Return a split over the active workers as shares of all workers; 0 for the others."""
    shares = np.zeros(n_workers)
    shares[active] = split
    return tuple(shares.tolist())
