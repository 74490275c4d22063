"""Scenarios for simulations: a cluster each, whose workers differ from each other or change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from controllers.timing._batch_time import BatchTime

from ._cluster import Cluster, Noise, Trace, by_step, jitter, stages, waves
from ._simulation import Hooked

BATCH = 128  # examples per worker and step, by default
OVERHEAD = 0.005  # seconds


@dataclass(frozen=True)
class Scenario:
    """A cluster, its initial global batch, and hooks that run before the policy under test."""

    name: str
    about: str
    cluster: Cluster
    global_batch: int
    before: tuple[Hooked, ...] = ()


Make = Callable[[int, int, np.random.Generator], tuple[Cluster, int] | tuple[Cluster, int, tuple[Hooked, ...]]]
_makers: dict[str, Make] = {}


def names() -> list[str]:
    """Return the names of all scenarios."""
    return list(_makers)


def about(name: str) -> str:
    """Return a one-line description of a scenario."""
    return (_makers[name].__doc__ or "").partition("\n")[0]


def scenario(name: str, workers: int = 8, steps: int = 600, seed: int = 0) -> Scenario:
    """Return a scenario by name; events are at fractions of `steps`.

    Raises a ValueError if there is no such scenario, or fewer than 2 workers.
    """
    if name not in _makers:
        raise ValueError(f"no scenario is called {name!r}; known are {', '.join(_makers)}.")
    if workers < 2 or steps < 1:
        raise ValueError(f"a scenario needs at least 2 workers and 1 step; got {workers} and {steps}.")
    cluster, batch, *before = _makers[name](workers, steps, np.random.default_rng([seed, 7]))
    return Scenario(name, about(name), cluster, batch, before[0] if before else ())


def named(make: Make) -> Make:
    """Add a scenario under the function's name; the first line of its docstring describes it. A decorator."""
    _makers[make.__name__.strip("_")] = make
    return make


def speeds(rng: np.random.Generator, n: int, spread: float = 4.0) -> np.ndarray:
    """Draw examples per second, log-uniform; the fastest is `spread` times as fast as the slowest."""
    exponent = rng.permutation(np.linspace(0, 1, n))
    return 1000.0 * spread**exponent


def affine_times(rng: np.random.Generator, n: int, fixed: float = 0.3, spread: float = 4.0) -> BatchTime:
    """Draw affine step times, of which about a part `fixed` at the first batch size is constant."""
    slope = 1 / speeds(rng, n, spread)
    return BatchTime(slope, BATCH * slope * fixed / (1 - fixed) * rng.uniform(0.5, 1.5, n))


def cluster_of(times: BatchTime, slowdown: Trace | None = None, noise: Noise | None = None, **more: object) -> Cluster:
    """Return a cluster with the usual overhead, and noise of 5 % unless another one is given."""
    return Cluster(times, slowdown, noise or jitter(0.05), overhead=OVERHEAD, **more)  # type: ignore[arg-type]


# The first line of each docstring is the scenario's description in `adaptive simulate --list`.


@named
def step_change(n, steps, rng):
    """Temporary slowdown: one worker takes three times as long in the second third of the run."""
    hit = np.where(np.arange(n) == rng.integers(n), 3.0, 1.0)
    trace = stages({0: 1.0, steps // 3: hit, 2 * steps // 3: 1.0}, n)
    return cluster_of(affine_times(rng, n, 0.1, 2.0), trace), BATCH * n


@named
def drift(n, steps, rng):
    """Drifting speeds: each worker oscillates by 40 %, like clocks that follow temperature."""
    return cluster_of(affine_times(rng, n, 0.1, 2.0), waves(0.4, steps / 3, rng.random(n))), BATCH * n


@named
def contention(n, steps, rng):
    """Free processor share and memory, which are measured, jump every 25 steps; speed follows share^0.8."""
    share, left = (_jumping(rng, steps, n, low, 0.04) for low in (0.25, 0.2))
    slow = 1 / (share**0.8 * np.minimum(1.0, 0.5 + left))
    times = BatchTime(1 / speeds(rng, n, 2.0))
    seen = {"cpu": by_step(share), "memory": by_step(1e9 * left), "sensor_noise": 0.02}
    return cluster_of(times, by_step(slow), jitter(0.03), **seen), BATCH * n


def _jumping(rng: np.random.Generator, steps: int, n: int, low: float, rate: float) -> np.ndarray:
    """Draw levels between `low` and 1, each constant until a jump; shape=(steps, n)."""
    levels, jump = rng.uniform(low, 1, (steps, n)), rng.random((steps, n)) < rate
    jump[0] = True
    last = np.maximum.accumulate(np.where(jump, np.arange(steps)[:, None], 0), axis=0)
    return np.take_along_axis(levels, last, axis=0)


@named
def spot(n, steps, rng):
    """Spot instances: workers are lost at random and return to a reserve, which replaces losses some steps later."""
    slots = n + max(1, n // 2)
    there = np.ones((steps + 1, slots), bool)
    for slot in range(1, slots):  # the first worker is never lost
        start = 1 + int(rng.exponential(steps / 2))
        while start <= steps:
            back = start + 1 + int(rng.exponential(steps / 10))
            there[start:back, slot] = False
            start = back + 1 + int(rng.exponential(steps / 2))
    reserve = {"present": lambda step: there[min(step, steps)], "first": n, "respawn": True}
    return cluster_of(affine_times(rng, slots, 0.1), join_after=max(1, steps // 60), **reserve), BATCH * n


@named
def scaling(n, steps, rng):
    """Two members, and a reserve; the exchange takes longer with more workers: how many are worth their cost?"""
    times = BatchTime(np.full(n, 1e-3), np.full(n, 0.02))
    cluster = Cluster(
        times,
        noise=jitter(0.05),
        overhead=lambda workers: OVERHEAD + 0.01 * (workers - 1),
        noise_scale=lambda examples: 8.0 * BATCH,
        upper=4 * BATCH,
        first=2,
        join_after=max(1, steps // 100),
    )
    return cluster, BATCH * 2
