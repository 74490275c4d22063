"""Models of clusters: workers with known step times, and disturbances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from controllers.timing.batch_time import BatchTime

Trace = Callable[[int, float], np.ndarray]
"""`trace(step, clock) -> shape=(n,)`: a number per worker, in the step that begins at `clock` seconds."""

Noise = Callable[[np.random.Generator, int, int], np.ndarray]
"""`noise(rng, steps, n) -> shape=(steps, n)`: what step times are multiplied by, that nobody can know beforehand."""


@dataclass(frozen=True)
class Cluster:
    """n modelled workers. Worker i's step on b examples takes `times_i(b) * slowdown_i * noise_i` seconds.

    Attributes:
      times: seconds at normal speed; each part of shape=(n,).
      slowdown: by what the times are multiplied, step by step: changes of speed. By default 1.
      noise: multiplies them too. What the best possible split is, is said without it.
      lower, upper: bounds on the workers' batches, shape=(n,) or one for all: memory, for instance.
      quantum: sizes are best multiples of this; `None` for one that follows the global batch, as a program's own does.
      overhead: seconds of a step in which nobody computes, the exchange; or a function of how many workers are there.
      present: which workers can be had, `present(step) -> bool, shape=(n,)`: losses, and who comes back. By default
        all. Where there is no reserve, whoever can be had is there.
      first: how many of the workers are there at first. The others are in reserve, and join when a policy asks for more
        workers. By default all, and no reserve.
      join_after: steps from that request until they join.
      respawn: whether a worker that is lost is replaced from the reserve, by itself.
      noise_scale: the gradient noise scale after a number of examples, `noise_scale(examples) -> examples`.
      cpu: free processor share of each worker, a trace. By default what explains the slowdown, `1 / slowdown`.
      memory: free bytes of each worker, a trace. By default 1 GB.
      sensor_noise: relative standard deviation of what is said of processor share and memory.
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

    def idle_seconds(self, workers: int) -> float:
        """Return the seconds of a step of this many workers in which no worker computes."""
        return self.overhead(workers) if callable(self.overhead) else self.overhead

    @property
    def workers(self) -> int:
        """How many workers there are, those included that join later, and the reserve."""
        return max(np.size(part) for part in self.times)

    @property
    def capacities(self) -> np.ndarray:
        """Examples per second at normal speed and on a large batch: what a data sheet would say; shape=(n,)."""
        return 1e4 / np.broadcast_to(self.times(1e4), self.workers)


# --- what happens to speeds -------------------------------------------------------------------------------------------


def stages(factors: Mapping[int, ArrayLike], n: int) -> Trace:
    """Return slowdowns that hold from a step on: `{0: 1.0, 100: (1, 1, 3, 1)}`."""
    starts = np.array(sorted(factors))
    if not len(starts) or starts[0] > 1:
        raise ValueError(f"stages: say from step 0 on what holds; the first entry is at step {starts[:1]}.")
    rows = np.stack([np.broadcast_to(np.asarray(factors[int(s)], np.float64), n) for s in starts])
    return lambda step, clock: rows[np.searchsorted(starts, step, side="right") - 1]


def by_step(rows: np.ndarray) -> Trace:
    """Return slowdowns given per step, shape=(steps, n); the last one continues."""
    last = len(rows)
    return lambda step, clock: rows[min(step, last) - 1]


def waves(amplitude: ArrayLike, period: float, phase: ArrayLike) -> Trace:
    """Speeds that drift to and fro over `period` steps: `exp(amplitude * sin(2 pi (step / period + phase)))`."""
    size, offset = np.asarray(amplitude, np.float64), np.asarray(phase, np.float64)
    return lambda step, clock: np.exp(size * np.sin(2 * np.pi * (step / period + offset)))


def neighbors(factor: ArrayLike, period: ArrayLike, busy: ArrayLike, phase: ArrayLike) -> Trace:
    """Return slowdowns by periodic neighbors: `factor` for a share `busy` of every `period` seconds."""
    slow, every, share, offset = (np.asarray(x, np.float64) for x in (factor, period, busy, phase))
    return lambda step, clock: np.where((clock / every + offset) % 1.0 < share, slow, 1.0)


def together(*traces: Trace) -> Trace:
    """The product of several."""

    def trace(step: int, clock: float) -> np.ndarray:
        product = traces[0](step, clock)
        for other in traces[1:]:
            product = product * other(step, clock)
        return product

    return trace


# --- what nobody can know ---------------------------------------------------------------------------------------------


def jitter(deviation: float) -> Noise:
    """Return lognormal noise of mean 1 and about this relative standard deviation."""
    return lambda rng, steps, n: np.exp(deviation * rng.standard_normal((steps, n)) - deviation**2 / 2)


def stragglers(rate: float, factor: float) -> Noise:
    """A step of a worker takes, with probability `rate`, longer by up to `factor` times (log-uniform)."""

    def noise(rng: np.random.Generator, steps: int, n: int) -> np.ndarray:
        hit = rng.random((steps, n)) < rate
        return np.where(hit, factor ** rng.random((steps, n)), 1.0)

    return noise


def noises(parts: Sequence[Noise]) -> Noise:
    """The product of several."""
    return lambda rng, steps, n: np.prod([part(rng, steps, n) for part in parts], axis=0)
