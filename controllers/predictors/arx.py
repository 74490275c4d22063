"""`arx`: predicts speed as a linear function of past speeds and of past and present inputs, learned online."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .base import Predictor, known, moving_average
from .lags import Lags

STIFFNESS = 1e-2  # weight of the prior "as fast as in the last step", relative to one record


class ArxState(NamedTuple):
    """State of `arx`. p = lags + (lags + 1) n_inputs + 1."""

    lags: Lags
    weights: np.ndarray  # shape=(n, p)
    covariance: np.ndarray  # shape=(n, p, p)
    records: np.ndarray  # shape=(n,), int64: number of records so far
    fallback: np.ndarray  # shape=(n,), examples per second: the prediction until there are enough records


def arx(lags: int = 2, memory: float = 400.0, records: int = 20) -> Predictor:
    """Return a predictor by autoregression with exogenous inputs: recursive least squares with exponential forgetting.

        v[k] = a_1 v[k-1] + … + a_L v[k-L] + b_0 u[k] + b_1 u[k-1] + … + b_L u[k-L] + d

    This is NARX without its hidden layer, and nearly as accurate.

    Args:
      lags: L.
      memory: time constant of forgetting, in records.
      records: number of records before the first prediction by regression; until then predicts by a moving average.

    Raises:
      ValueError: an argument is out of range.
    """
    if lags < 1 or memory < 2 or records < 0:
        raise ValueError(f"arx: lags >= 1, memory >= 2 and records >= 0 must hold; got {lags}, {memory}, {records}.")
    average = moving_average()

    def init(n_workers: int, n_inputs: int) -> ArxState:
        size = lags + (lags + 1) * n_inputs + 1
        weights = np.zeros((n_workers, size))
        weights[:, 0] = 1
        learned = weights, np.tile(np.eye(size) / STIFFNESS, (n_workers, 1, 1)), np.zeros(n_workers, np.int64)
        return ArxState(Lags.init(n_workers, n_inputs, lags), *learned, average.init(n_workers, 0))

    def update(state: ArxState, speed: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, ArxState]:
        mean, fallback = average.update(state.fallback, speed, inputs)
        state = _learned(state, speed / state.lags.speed_unit, 1 - 1 / memory)
        history = state.lags.push(speed, inputs)
        said = (state.weights * history.row()).sum(axis=1) * history.speed_unit
        trusted = (state.records >= records) & np.isfinite(said)
        prediction = np.where(trusted, np.clip(said, mean / 3, mean * 3), mean)
        return prediction, state._replace(lags=history, fallback=fallback)

    return Predictor(init, update, "arx")


def _learned(state: ArxState, target: np.ndarray, forget: float) -> ArxState:
    """Return the state after one step of recursive least squares, for the workers where all is known."""
    weights, covariance, row = state.weights, state.covariance, state.lags.row()
    learn = np.isfinite(row).all(axis=1) & known(target)
    row, target = np.where(learn[:, None], row, 0.0), np.where(learn, target, 0.0)
    along = np.einsum("nij,nj->ni", covariance, row)
    gain = along / (forget + (row * along).sum(axis=1))[:, None]
    weights = weights + gain * (target - (weights * row).sum(axis=1))[:, None]
    smaller = (covariance - gain[:, :, None] * along[:, None, :]) / forget
    # Directions that are never excited would be forgotten without limit: keep the prior's stiffness.
    trace = np.trace(smaller, axis1=1, axis2=2)
    smaller *= np.minimum(1.0, row.shape[1] / STIFFNESS / trace)[:, None, None]
    covariance = np.where(learn[:, None, None], smaller, covariance)
    return state._replace(weights=weights, covariance=covariance, records=state.records + learn)
