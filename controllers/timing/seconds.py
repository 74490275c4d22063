"""What policies read of the workers' times."""

from __future__ import annotations

from typing import Any

import numpy as np

from adaptive import DriverError
from adaptive.extend import Observation


def seconds_of(observation: Observation, policy: str) -> np.ndarray:
    """The hook's first value, checked to be a number per worker; shape=(n,)."""
    n = len(observation.batch_sizes)
    values: tuple[Any, ...] = observation.values
    if not values or np.shape(values[0]) != (n,):
        got = f"shape {np.shape(values[0])}" if values else "nothing"
        raise DriverError(
            f"{policy} reads one time per worker, shape ({n},); it was given {got}. Gather them:\n"
            f"    seconds = comm.all_gather(mon.compute_seconds())\n"
            f"    ctrl.hook(ctrl.{policy}(), seconds)"
        )
    return np.asarray(values[0], np.float64)


def active_of(observation: Observation) -> np.ndarray:
    """The numbers of the workers that take examples: decisions are about these alone. int64, shape=(their number,)."""
    return np.array(observation.limits.active, np.int64)


def shares_of(split: np.ndarray, active: np.ndarray, n_workers: int) -> tuple[float, ...]:
    """A split over those who take examples, as shares of all; 0 for the others."""
    shares = np.zeros(n_workers)
    shares[active] = split
    return tuple(shares.tolist())


def inputs_of(observation: Observation, policy: str, expected: int | None = None) -> np.ndarray:
    """The hook's further values, each checked to be a number per worker; shape=(n, how many). As many as `expected`,
    unless that is for the policy to say."""
    n, further = len(observation.batch_sizes), observation.values[1:]
    if expected is not None and len(further) != expected:
        raise ValueError(
            f"{policy} was made for {expected} inputs behind the times, and was given {len(further)}. Make it with "
            f"n_inputs={len(further)}, and a predictor that reads them, such as arx()."
        )
    for value in further:
        if np.shape(value) != (n,):
            raise DriverError(
                f"{policy} reads one number per worker, shape ({n},), behind the times; it was given shape "
                f"{np.shape(value)}. Gather them:  comm.all_gather(mon.cpu_available())"
            )
    return np.stack([np.asarray(v, np.float64) for v in further], axis=1) if further else np.zeros((n, 0))
