"""Models of clusters: workers with known step times, and disturbances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from adaptive.base.decision import Limits
from controllers.timing._batch_time import BatchTime

Trace = Callable[[int, float], np.ndarray]
"""`trace(step, clock) -> shape=(n,)`: a number per worker, in the step that begins at `clock` seconds."""

Noise = Callable[[np.random.Generator, int, int], np.ndarray]
"""`noise(rng, steps, n) -> shape=(steps, n)`: unpredictable factors of the step times."""


@dataclass(frozen=True)
class Cluster:
    """Model of n workers. Worker i's step on b examples takes `times_i(b) * slowdown_i * noise_i` seconds.

    Attributes:
      times: seconds at normal speed; each part has shape=(n,).
      slowdown: factors of the times, step by step: changes of speed. Default: 1.
      noise: further factors of the times. The best possible split is computed without them.
      lower, upper: bounds of the local batches; shape=(n,) or one number for all.
      quantum: sizes are preferably multiples of this; `None`: it follows the global batch, as in a program.
      overhead: seconds of a step besides computing; or a function of the number of workers.
      present: available workers, `present(step) -> bool, shape=(n,)`. Default: all.
      first: number of members at the start; the others are in reserve. Default: all available workers are members.
      join_after: steps from a request until workers join.
      respawn: whether the reserve replaces lost workers automatically.
      noise_scale: the gradient noise scale, `noise_scale(examples so far) -> examples`.
      cpu: free processor share of each worker, a trace. Default: `1 / slowdown`.
      memory: free bytes of each worker, a trace. Default: 1 GB.
      sensor_noise: relative standard deviation of the measured processor share and memory.
    """

    times: BatchTime
    slowdown: Trace | None = None
    noise: Noise | None = None
    lower: ArrayLike = 1
    upper: ArrayLike = 10**9
    quantum: int | None = 1
    overhead: float | Callable[[int], float] = 0.0
    present: Callable[[int], np.ndarray] | None = None
    noise_scale: Callable[[float], float] | None = None
    cpu: Trace | None = None
    memory: Trace | None = None
    sensor_noise: float = 0.0
    first: int | None = None
    join_after: int = 0
    respawn: bool = False

    def overhead_of(self, workers: int) -> float:
        """Return the overhead of a step of this many workers, in seconds."""
        return self.overhead(workers) if callable(self.overhead) else self.overhead

    @property
    def limits(self) -> Limits:
        """Bounds of the local batches, and the quantum."""
        lower, upper = (np.broadcast_to(np.asarray(b, np.int64), self.workers) for b in (self.lower, self.upper))
        return Limits(tuple(lower.tolist()), tuple(upper.tolist()), self.quantum or 1)

    @property
    def workers(self) -> int:
        """Number of workers, including the reserve and workers that join later."""
        return max(np.size(part) for part in self.times)

    @property
    def capacities(self) -> np.ndarray:
        """Examples per second at normal speed and on a large batch, as in a data sheet; shape=(n,)."""
        return 1e4 / np.broadcast_to(self.times(1e4), self.workers)


def stages(factors: Mapping[int, ArrayLike], n: int) -> Trace:
    """Return slowdowns that are constant from each given step to the next. Raises a ValueError without step 0 or 1."""
    starts = np.array(sorted(factors))
    if not len(starts) or starts[0] > 1:
        raise ValueError(f"stages: the first entry must be for step 0; it is for step {starts[:1]}.")
    rows = np.stack([np.broadcast_to(np.asarray(factors[int(s)], np.float64), n) for s in starts])
    return lambda step, clock: rows[np.searchsorted(starts, step, side="right") - 1]


def by_step(rows: np.ndarray) -> Trace:
    """Return slowdowns given per step, shape=(steps, n); the last one continues."""
    last = len(rows)
    return lambda step, clock: rows[min(step, last) - 1]


def waves(amplitude: ArrayLike, period: float, phase: ArrayLike) -> Trace:
    """Return slowdowns that oscillate: `exp(amplitude * sin(2 pi (step / period + phase)))`; `period` in steps."""
    size, offset = np.asarray(amplitude, np.float64), np.asarray(phase, np.float64)
    return lambda step, clock: np.exp(size * np.sin(2 * np.pi * (step / period + offset)))


def jitter(deviation: float) -> Noise:
    """Return lognormal noise of mean 1 and about this relative standard deviation."""
    return lambda rng, steps, n: np.exp(deviation * rng.standard_normal((steps, n)) - deviation**2 / 2)
