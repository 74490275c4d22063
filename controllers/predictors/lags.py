"""The latest speeds and inputs of each worker as rows of a regression, scaled to about 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .base import known


class Lags(NamedTuple):
    """A short history, in units of the first value seen. A pytree; methods return a new one."""

    speeds: np.ndarray  # shape=(n, lags), latest first; NaN before there are that many
    inputs: np.ndarray  # shape=(n, lags + 1, n_inputs), latest first
    speed_unit: np.ndarray  # shape=(n,), examples per second; NaN before the first
    input_unit: np.ndarray  # shape=(n, n_inputs)

    @classmethod
    def init(cls, n_workers: int, n_inputs: int, lags: int) -> Lags:
        """Return an empty history."""
        n = n_workers
        return cls(*(np.full(shape, np.nan) for shape in ((n, lags), (n, lags + 1, n_inputs), n, (n, n_inputs))))

    def row(self) -> np.ndarray:
        """Return `v[k-1], …, v[k-L], u[k], …, u[k-L], 1` for step k; shape=(n, L + (L + 1) n_inputs + 1)."""
        n = len(self.speeds)
        return np.concatenate([self.speeds, self.inputs.reshape(n, -1), np.ones((n, 1))], axis=1)

    def push(self, speed: np.ndarray, inputs: np.ndarray) -> Lags:
        """Return the history after a step: its speed, and the inputs of the next. Missing values repeat."""
        speed_unit = np.where(np.isnan(self.speed_unit) & known(speed), speed, self.speed_unit)
        usable = np.isfinite(inputs)
        magnitude = np.where(inputs == 0, 1.0, np.abs(inputs))
        input_unit = np.where(np.isnan(self.input_unit) & usable, magnitude, self.input_unit)
        latest_speed = np.where(known(speed), speed / speed_unit, self.speeds[:, 0])
        latest_inputs = np.where(usable, inputs / input_unit, self.inputs[:, 0])
        speeds = np.concatenate([latest_speed[:, None], self.speeds[:, :-1]], axis=1)
        inputs = np.concatenate([latest_inputs[:, None], self.inputs[:, :-1]], axis=1)
        return Lags(speeds, inputs, speed_unit, input_unit)
