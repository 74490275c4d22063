"""Scenarios for simulations. Each models one property of real clusters, or the cluster of a published experiment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from controllers.policies.noise_batch import noise_batch
from controllers.policies.noise_workers import noise_workers
from controllers.policies.schedule import schedule
from controllers.timing._batch_time import BatchTime

from ._cluster import Cluster, Noise, Trace, by_step, jitter, neighbors, noises, stages, stragglers, together, waves
from ._simulation import Hooked

BATCH = 128  # examples per worker and step, by default
OVERHEAD = 0.005  # seconds
LBB = BatchTime(  # milliseconds of one Tesla M40, two GTX 1070s and a GTX 750, through the points of LBB's table 2
    np.array([0.5931, 0.5808, 0.6023, 2.6714]), np.array([5.896, 7.152, 8.291, 50.982])
)
HL_STAGES = ("HL1", "HL2", "HL4", "HL8", "HL8", "HL4", "HL2", "HL1")
HL_CORES = {"HL1": (12, 12, 12, 12), "HL2": (12, 12, 8, 16), "HL4": (9, 9, 6, 24), "HL8": (6, 6, 4, 32)}
H_LEVELS = {"h1": (13, 13, 13), "h2": (9, 12, 18), "h4": (3, 5, 12), "h6": (4, 11, 24), "h10": (2, 17, 20)}


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
    """Return a scenario by name.

    Args:
      name: see `names`.
      workers: number of workers; those of published experiments are repeated up to that number.
      steps: number of steps; events are at fractions of it.
      seed: of speeds and events.

    Raises:
      ValueError: there is no such scenario, or there are fewer than 2 workers.
    """
    if name not in _makers:
        raise ValueError(f"no scenario is called {name!r}; known are {', '.join(_makers)}.")
    if workers < 2 or steps < 1:
        raise ValueError(f"a scenario needs at least 2 workers and 1 step; got {workers} and {steps}.")
    cluster, batch, *before = _makers[name](workers, steps, np.random.default_rng([seed, 7]))
    return Scenario(name, about(name), cluster, batch, before[0] if before else ())


def _named(make: Make) -> Make:
    _makers[make.__name__.strip("_")] = make
    return make


def _speeds(rng: np.random.Generator, n: int, spread: float = 4.0) -> np.ndarray:
    """Draw examples per second, log-uniform; the fastest is `spread` times as fast as the slowest."""
    exponent = rng.permutation(np.linspace(0, 1, n))
    return 1000.0 * spread**exponent


def _affine(rng: np.random.Generator, n: int, fixed: float = 0.3, spread: float = 4.0) -> BatchTime:
    """Draw affine step times, of which about a part `fixed` at the first batch size is constant."""
    slope = 1 / _speeds(rng, n, spread)
    return BatchTime(slope, BATCH * slope * fixed / (1 - fixed) * rng.uniform(0.5, 1.5, n))


def _cluster(times: BatchTime, slowdown: Trace | None = None, noise: Noise | None = None, **more: object) -> Cluster:
    return Cluster(times, slowdown, noise or jitter(0.05), overhead=OVERHEAD, **more)  # type: ignore[arg-type]


# --- constant speeds --------------------------------------------------------------------------------------------------
# The first line of each docstring is the scenario's description in `adaptive simulate --list`.


@_named
def equal(n, steps, rng):
    """Equal workers: there is nothing to gain, and acting on noise costs time."""
    return _cluster(BatchTime(np.full(n, 1e-3), np.full(n, 0.03))), BATCH * n


@_named
def proportional(n, steps, rng):
    """Speeds up to four times apart; time is proportional to the batch."""
    return _cluster(BatchTime(1 / _speeds(rng, n))), BATCH * n


@_named
def affine(n, steps, rng):
    """Speeds up to four times apart; a third of a step is constant."""
    return _cluster(_affine(rng, n)), BATCH * n


@_named
def flat(n, steps, rng):
    """Constant times: a quarter of the workers take 200 ms for any batch (launch-bound accelerators, slow disks)."""
    slope, few = 1 / _speeds(rng, n), max(1, n // 4)
    slow = np.arange(n) < few
    return _cluster(BatchTime(np.where(slow, 0.0005, slope), np.zeros(n), np.where(slow, 0.2, 0.0))), BATCH * n


@_named
def knees(n, steps, rng):
    """Accelerators: constant time up to a batch between 32 and 256, linear above; speeds up to six times apart."""
    slope = 1 / _speeds(rng, n, 6.0)
    knee = 32 * 8 ** rng.random(n)
    return _cluster(BatchTime(slope, 0.2 * slope * knee, 1.2 * slope * knee)), BATCH * n


@_named
def memory(n, steps, rng):
    """Speeds up to four times apart; no worker has memory for more than 1.3 times an equal share."""
    return _cluster(_affine(rng, n, 0.1), upper=int(1.3 * BATCH)), BATCH * n


# --- speeds that change -----------------------------------------------------------------------------------------------


@_named
def step_change(n, steps, rng):
    """Temporary slowdown: one worker takes three times as long in the second third of the run."""
    hit = np.where(np.arange(n) == rng.integers(n), 3.0, 1.0)
    trace = stages({0: 1.0, steps // 3: hit, 2 * steps // 3: 1.0}, n)
    return _cluster(_affine(rng, n, 0.1, 2.0), trace), BATCH * n


@_named
def cascade(n, steps, rng):
    """Changing slowdown: after every eighth of the run, another worker takes up to four times as long."""
    rows = {0: np.ones(n)}
    for start in range(steps // 8, steps, max(steps // 8, 1)):
        rows[start] = np.where(np.arange(n) == rng.integers(n), 1 + 3 * rng.random(), 1.0)
    return _cluster(_affine(rng, n, 0.1, 2.0), stages(rows, n)), BATCH * n


@_named
def drift(n, steps, rng):
    """Speeds oscillate by 40 %, each with its own phase, like clocks that follow temperature."""
    return _cluster(_affine(rng, n, 0.1, 2.0), waves(0.4, steps / 3, rng.random(n))), BATCH * n


@_named
def periodic(n, steps, rng):
    """Periodic jobs of others, 20 to 40 s apart, take half of the processor of half of the workers."""
    factor = np.where(rng.permutation(n) < n // 2, 2.0, 1.0)
    return _cluster(_affine(rng, n, 0.1, 2.0), neighbors(factor, rng.uniform(20, 40, n), 0.5, rng.random(n))), BATCH * n


@_named
def contention(n, steps, rng):
    """Free processor share and memory, which are measured, jump every 25 steps; speed follows share^0.8."""
    share, left = (_jumping(rng, steps, n, low, 0.04) for low in (0.25, 0.2))
    slow = 1 / (share**0.8 * np.minimum(1.0, 0.5 + left))
    times = BatchTime(1 / _speeds(rng, n, 2.0))
    seen = {"cpu": by_step(share), "memory": by_step(1e9 * left), "sensor_noise": 0.02}
    return _cluster(times, by_step(slow), jitter(0.03), **seen), BATCH * n


def _jumping(rng: np.random.Generator, steps: int, n: int, low: float, rate: float) -> np.ndarray:
    """Draw levels between `low` and 1, each constant until a jump; shape=(steps, n)."""
    levels, jump = rng.uniform(low, 1, (steps, n)), rng.random((steps, n)) < rate
    jump[0] = True
    last = np.maximum.accumulate(np.where(jump, np.arange(steps)[:, None], 0), axis=0)
    return np.take_along_axis(levels, last, axis=0)


# --- noise ------------------------------------------------------------------------------------------------------------


@_named
def noisy(n, steps, rng):
    """Speeds up to two times apart, with noise of 20 %."""
    return _cluster(_affine(rng, n, 0.1, 2.0), noise=jitter(0.2)), BATCH * n


@_named
def random_stragglers(n, steps, rng):
    """Unpredictable stragglers: in 2 % of its steps, a worker takes up to eight times as long."""
    return _cluster(_affine(rng, n, 0.1, 2.0), noise=noises([jitter(0.05), stragglers(0.02, 8.0)])), BATCH * n


# --- workers and batches that change ----------------------------------------------------------------------------------


@_named
def elastic(n, steps, rng):
    """Losses and joins: a worker is lost at a third of the run; two of unknown speed join at two thirds."""
    late, lost = min(2, n - 1), n - 1

    def present(step: int) -> np.ndarray:
        here = np.ones(n + late, bool)
        here[n:] = step > 2 * steps // 3
        here[lost] = step <= steps // 3
        return here

    return _cluster(_affine(rng, n + late, 0.1), present=present), BATCH * n


@_named
def growing(n, steps, rng):
    """Growing batch: a schedule doubles the global batch three times."""
    batches = {k * steps // 4: 32 * n * 2**k for k in range(4)}
    return _cluster(_affine(rng, n, 0.1)), 32 * n, (Hooked(schedule(batches), ()),)


@_named
def noise_scale(n, steps, rng):
    """Both control loops: the global batch follows a noise scale that grows forty times."""
    first, total = 32.0 * n, 128.0 * n * steps

    def scale(examples: float) -> float:
        return first * 40.0 ** min(examples / total, 1.0)

    hook = Hooked(noise_batch(max_batch=32 * 40 * n), ("noise_scale",), 20)
    return (
        _cluster(_affine(rng, n, 0.1), stages({0: 1.0, steps // 2: _one(n, 2.0)}, n), noise_scale=scale),
        32 * n,
        (hook,),
    )


def _one(n: int, factor: float) -> np.ndarray:
    return np.where(np.arange(n) == 0, factor, 1.0)


# --- numbers of workers that change -----------------------------------------------------------------------------------


@_named
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
    return _cluster(_affine(rng, slots, 0.1), join_after=max(1, steps // 60), **reserve), BATCH * n


@_named
def listing_1(n, steps, rng):
    """KungFu's Listing 1: the number of workers follows the noise scale, which grows `workers` times."""
    total = BATCH * steps * n / 4

    def scale(examples: float) -> float:
        return BATCH * n ** min(1.2 * examples / total, 1.1)

    hook = Hooked(noise_workers(BATCH), ("noise_scale",), max(1, steps // 40))
    reserve = {"first": 1, "join_after": max(1, steps // 100)}
    return _cluster(_affine(rng, n, 0.1, 2.0), noise_scale=scale, **reserve), BATCH, (hook,)


@_named
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


# --- published experiments --------------------------------------------------------------------------------------------


@_named
def lbb(n, steps, rng):
    """LB-BSP's and LBB's case: four GPUs, one of them five times as slow (LBB, table 2)."""
    times = BatchTime(*(np.resize(np.asarray(part) / 1e3, n) for part in LBB[:2]))
    return Cluster(times, noise=jitter(0.02)), BATCH * n


def _cores(levels: tuple[int, ...], n: int) -> np.ndarray:
    return np.resize(np.asarray(levels, np.float64), n)


def _h(level: str) -> Make:
    def make(n, steps, rng):
        # 10 ms of a step with b0 = 64 on 13 cores (200 ms) are constant.
        per_example = 0.19 * 13 / 64 / _cores(H_LEVELS[level], n)
        return Cluster(BatchTime(per_example, np.full(n, 0.01)), noise=jitter(0.05)), 64 * n

    cores = ", ".join(map(str, H_LEVELS[level]))
    make.__name__, make.__doc__ = level, f"Tyagi & Sharma's clusters: workers of {cores} cores."
    return make


for _level in H_LEVELS:
    _named(_h(_level))


@_named
def omnilearn(n, steps, rng):
    """OmniLearn's schedule: 48 cores, split more unevenly and then less (HL1, 2, 4, 8, 8, 4, 2, 1)."""
    length = -(-steps // len(HL_STAGES))
    trace = stages({k * length + (k > 0): 12 / _cores(HL_CORES[level], n) for k, level in enumerate(HL_STAGES)}, n)
    return Cluster(BatchTime(np.full(n, 0.19 / 32), np.full(n, 0.01)), trace, jitter(0.05)), 32 * n


@_named
def mixed(n, steps, rng):
    """Several of the above: knees, drift, a step change, stragglers, and a batch that doubles."""
    slope, knee = 1 / _speeds(rng, n), 32 * 4 ** rng.random(n)
    trace = together(waves(0.2, steps / 2, rng.random(n)), stages({0: 1.0, steps // 3: _one(n, 2.5)}, n))
    noise = noises([jitter(0.05), stragglers(0.005, 5.0)])
    batches = {0: 64 * n, steps // 2: 128 * n}
    times = BatchTime(slope, 0.2 * slope * knee, 1.2 * slope * knee)
    return _cluster(times, trace, noise), 64 * n, (Hooked(schedule(batches), ()),)
