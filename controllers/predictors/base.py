"""Predictors of each worker's speed in the next step, for `lb_bsp`.

A predictor is a pair of pure functions over arrays with one row per worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

PredictorState = Any  # a pytree of numpy arrays; its structure and shapes never change


class Predictor(NamedTuple):
    """A rule that predicts speeds.

    Attributes:
      init: `init(n_workers, n_inputs) -> state`.
      update: `update(state, speed, inputs) -> (prediction, state)`, with `speed` the examples per second of the
        previous step, shape=(n,), and `inputs` the current measurements, shape=(n, n_inputs); NaN where not known.
        Predicts the examples per second of this step, shape=(n,); NaN for workers that were never measured.
      name: its name in errors.
    """

    init: Callable[[int, int], PredictorState]
    update: Callable[[PredictorState, np.ndarray, np.ndarray], tuple[np.ndarray, PredictorState]]
    name: str = "predictor"


def memoryless() -> Predictor:
    """Return a predictor that repeats the last known speed."""
    return moving_average(1.0)._replace(name="memoryless")


def moving_average(weight: float = 0.5) -> Predictor:
    """Return a predictor by moving average: `mean <- mean + weight * (speed - mean)`, from the first speed on.

    Raises:
      ValueError: `weight` is out of range.
    """
    if not 0 < weight <= 1:
        raise ValueError(f"moving_average: weight must be above 0 and at most 1, got {weight}.")

    def update(state: np.ndarray, speed: np.ndarray, _: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        moved = np.where(np.isnan(state), speed, state + weight * (speed - state))
        mean = np.where(known(speed), moved, state)
        return mean, mean

    return Predictor(lambda n_workers, n_inputs: np.full(n_workers, np.nan), update, "moving_average")


class BestOfState(NamedTuple):
    """State of `best_of`."""

    states: tuple[PredictorState, ...]
    predictions: np.ndarray  # shape=(predictors, n): the last ones, to compare with the next known speed
    errors: np.ndarray  # shape=(predictors, n): running means of the squared relative error; NaN before the first


def best_of(*predictors: Predictor, memory: float = 50.0) -> Predictor:
    """Return a predictor that uses, for each worker, the predictor with the smallest recent error; at first, the first.

    Args:
      *predictors: all are updated in each step.
      memory: number of steps over which errors are averaged.

    Raises:
      ValueError: no predictor is given, or `memory` is below 1.
    """
    if not predictors or memory < 1:
        raise ValueError("best_of: give at least one predictor, and a memory of at least 1 step.")

    def init(n_workers: int, n_inputs: int) -> BestOfState:
        nothing = np.full((len(predictors), n_workers), np.nan)
        return BestOfState(tuple(p.init(n_workers, n_inputs) for p in predictors), nothing, nothing)

    def update(state: BestOfState, speed: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, BestOfState]:
        error = (state.predictions / np.where(known(speed), speed, np.nan) - 1) ** 2
        moved = np.where(np.isnan(state.errors), error, state.errors + (error - state.errors) / memory)
        errors = np.where(np.isnan(error), state.errors, moved)
        pairs = [p.update(s, speed, inputs) for p, s in zip(predictors, state.states, strict=True)]
        predictions = np.stack([prediction for prediction, _ in pairs])
        best = np.argmin(np.where(np.isnan(errors), np.inf, errors), axis=0)
        chosen = predictions[best, np.arange(len(speed))]
        return chosen, BestOfState(tuple(s for _, s in pairs), predictions, errors)

    return Predictor(init, update, f"best_of({', '.join(p.name for p in predictors)})")


def known(speed: np.ndarray) -> np.ndarray:
    """Return a mask of the known speeds, which are finite and positive; of the shape of `speed`."""
    return (speed > 0) & (speed < np.inf)
