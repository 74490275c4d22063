"""Model of a worker's compute time by batch size: constant up to a size, then linear."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Column = Any  # one number per worker, or one for all: what numpy broadcasts to shape=(n,)


class BatchTime(NamedTuple):
    """Seconds per step of each worker: `t_i(b) = max(floor_i, slope_i * b + intercept_i)`.

    An accelerator takes its launch time however small the batch; beyond some size, time grows with the examples.

    References:
      Chen et al., "Fast Distributed Deep Learning via Worker-adaptive Batch Sizing" (LB-BSP, arXiv 1806.02508).
    """

    slope: Column  # shape=(n,), seconds per example, >= 0
    intercept: Column = 0.0  # shape=(n,), seconds
    floor: Column = 0.0  # shape=(n,), seconds: no step takes less

    def __call__(self, sizes: Column) -> np.ndarray:
        """Return the seconds of each worker for its size; shape=(n,)."""
        return np.maximum(self.floor, np.multiply(self.slope, sizes) + self.intercept)
