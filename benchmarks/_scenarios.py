"""More scenarios for simulations, beside those of `adaptive simulate`; two are the clusters of published experiments.

Importing this file adds them to `controllers.simulate.names()`.
"""

from __future__ import annotations

import math

import numpy as np

from controllers.policies.noise import noise_batch, noise_workers
from controllers.policies.schedule import schedule
from controllers.simulate import Cluster, Hooked, Simulation, jitter, stages, waves
from controllers.simulate._scenarios import BATCH, Make, affine_times, cluster_of, named, speeds
from controllers.timing._batch_time import BatchTime

LBB = BatchTime(  # milliseconds of one Tesla M40, two GTX 1070s and a GTX 750, through the points of LBB's table 2
    np.array([0.5931, 0.5808, 0.6023, 2.6714]), np.array([5.896, 7.152, 8.291, 50.982])
)
HL_STAGES = ("HL1", "HL2", "HL4", "HL8", "HL8", "HL4", "HL2", "HL1")
HL_CORES = {"HL1": (12, 12, 12, 12), "HL2": (12, 12, 8, 16), "HL4": (9, 9, 6, 24), "HL8": (6, 6, 4, 32)}
H_LEVELS = {"h1": (13, 13, 13), "h2": (9, 12, 18), "h4": (3, 5, 12), "h6": (4, 11, 24), "h10": (2, 17, 20)}


def over(sim: Simulation, steps: slice = slice(None)) -> float:
    """Return the seconds of steps over those of the best splits of the same batches, with the same noise."""
    return float(sim.step_seconds[steps].sum() / sim.ideal_seconds[steps].sum())


def gain(sim: Simulation, base: Simulation, steps: slice = slice(None)) -> float:
    """Return the examples per second over those of another run in the same steps."""
    rates = [s.global_batch[steps].sum() / s.step_seconds[steps].sum() for s in (sim, base)]
    return float(rates[0] / rates[1])


def neighbors(factor, period, busy, phase):
    """Return slowdowns by periodic jobs of others: `factor` for a share `busy` of every `period` seconds."""
    return lambda step, clock: np.where((clock / period + phase) % 1.0 < busy, factor, 1.0)


def stragglers(rate: float, factor: float):
    """Return noise by which a step takes, with probability `rate`, up to `factor` times as long (log-uniform)."""

    def noise(rng, steps, n):
        hit = rng.random((steps, n)) < rate
        return np.where(hit, factor ** rng.random((steps, n)), 1.0)

    return noise


def together(*parts):
    """Return the product of several traces, or of several noises."""
    return lambda *args: math.prod(part(*args) for part in parts)


# --- constant speeds --------------------------------------------------------------------------------------------------
# The first line of each docstring is the scenario's description in `adaptive simulate --list`.


@named
def equal(n, steps, rng):
    """Equal workers: there is nothing to gain, and acting on noise costs time."""
    return cluster_of(BatchTime(np.full(n, 1e-3), np.full(n, 0.03))), BATCH * n


@named
def proportional(n, steps, rng):
    """Speeds up to four times apart; time is proportional to the batch."""
    return cluster_of(BatchTime(1 / speeds(rng, n))), BATCH * n


@named
def affine(n, steps, rng):
    """Speeds up to four times apart; a third of a step is constant."""
    return cluster_of(affine_times(rng, n)), BATCH * n


@named
def flat(n, steps, rng):
    """Constant times: a quarter of the workers take 200 ms for any batch (launch-bound accelerators, slow disks)."""
    slope, few = 1 / speeds(rng, n), max(1, n // 4)
    slow = np.arange(n) < few
    return cluster_of(BatchTime(np.where(slow, 0.0005, slope), np.zeros(n), np.where(slow, 0.2, 0.0))), BATCH * n


@named
def knees(n, steps, rng):
    """Accelerators: constant time up to a batch between 32 and 256, linear above; speeds up to six times apart."""
    slope = 1 / speeds(rng, n, 6.0)
    knee = 32 * 8 ** rng.random(n)
    return cluster_of(BatchTime(slope, 0.2 * slope * knee, 1.2 * slope * knee)), BATCH * n


@named
def memory(n, steps, rng):
    """Speeds up to four times apart; no worker has memory for more than 1.3 times an equal share."""
    return cluster_of(affine_times(rng, n, 0.1), upper=int(1.3 * BATCH)), BATCH * n


@named
def cascade(n, steps, rng):
    """Cascade of slowdowns: after every eighth of the run, another worker takes up to four times as long."""
    rows = {0: np.ones(n)}
    for start in range(steps // 8, steps, max(steps // 8, 1)):
        rows[start] = np.where(np.arange(n) == rng.integers(n), 1 + 3 * rng.random(), 1.0)
    return cluster_of(affine_times(rng, n, 0.1, 2.0), stages(rows, n)), BATCH * n


@named
def periodic(n, steps, rng):
    """Periodic jobs of others, 20 to 40 s apart, take half of the processor of half of the workers."""
    factor = np.where(rng.permutation(n) < n // 2, 2.0, 1.0)
    return cluster_of(
        affine_times(rng, n, 0.1, 2.0), neighbors(factor, rng.uniform(20, 40, n), 0.5, rng.random(n))
    ), BATCH * n


@named
def noisy(n, steps, rng):
    """Speeds up to two times apart, with noise of 20 %."""
    return cluster_of(affine_times(rng, n, 0.1, 2.0), noise=jitter(0.2)), BATCH * n


@named
def random_stragglers(n, steps, rng):
    """Unpredictable stragglers: in 2 % of its steps, a worker takes up to eight times as long."""
    return cluster_of(affine_times(rng, n, 0.1, 2.0), noise=together(jitter(0.05), stragglers(0.02, 8.0))), BATCH * n


@named
def elastic(n, steps, rng):
    """Losses and joins: a worker is lost at a third of the run; two of unknown speed join at two thirds."""
    late, lost = min(2, n - 1), n - 1

    def present(step: int) -> np.ndarray:
        here = np.ones(n + late, bool)
        here[n:] = step > 2 * steps // 3
        here[lost] = step <= steps // 3
        return here

    return cluster_of(affine_times(rng, n + late, 0.1), present=present), BATCH * n


@named
def growing(n, steps, rng):
    """Growing batch: a schedule doubles the global batch three times."""
    batches = {k * steps // 4: 32 * n * 2**k for k in range(4)}
    return cluster_of(affine_times(rng, n, 0.1)), 32 * n, (Hooked(schedule(batches), ()),)


@named
def noise_scale(n, steps, rng):
    """Both control loops: the global batch follows a noise scale that grows forty times."""
    first, total = 32.0 * n, 128.0 * n * steps

    def scale(examples: float) -> float:
        return first * 40.0 ** min(examples / total, 1.0)

    hook = Hooked(noise_batch(max_batch=32 * 40 * n), ("noise_scale",), 20)
    return (
        cluster_of(affine_times(rng, n, 0.1), stages({0: 1.0, steps // 2: _one(n, 2.0)}, n), noise_scale=scale),
        32 * n,
        (hook,),
    )


def _one(n: int, factor: float) -> np.ndarray:
    return np.where(np.arange(n) == 0, factor, 1.0)


@named
def listing_1(n, steps, rng):
    """KungFu's Listing 1: the number of workers follows the noise scale, which grows `workers` times."""
    total = BATCH * steps * n / 4

    def scale(examples: float) -> float:
        return BATCH * n ** min(1.2 * examples / total, 1.1)

    hook = Hooked(noise_workers(BATCH), ("noise_scale",), max(1, steps // 40))
    reserve = {"first": 1, "join_after": max(1, steps // 100)}
    return cluster_of(affine_times(rng, n, 0.1, 2.0), noise_scale=scale, **reserve), BATCH, (hook,)


@named
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
    named(_h(_level))


@named
def omnilearn(n, steps, rng):
    """OmniLearn's schedule: 48 cores, split more unevenly and then less (HL1, 2, 4, 8, 8, 4, 2, 1)."""
    length = -(-steps // len(HL_STAGES))
    trace = stages({k * length + (k > 0): 12 / _cores(HL_CORES[level], n) for k, level in enumerate(HL_STAGES)}, n)
    return Cluster(BatchTime(np.full(n, 0.19 / 32), np.full(n, 0.01)), trace, jitter(0.05)), 32 * n


@named
def mixed(n, steps, rng):
    """Several of the above: knees, drift, a step change, stragglers, and a batch that doubles."""
    slope, knee = 1 / speeds(rng, n), 32 * 4 ** rng.random(n)
    trace = together(waves(0.2, steps / 2, rng.random(n)), stages({0: 1.0, steps // 3: _one(n, 2.5)}, n))
    noise = together(jitter(0.05), stragglers(0.005, 5.0))
    batches = {0: 64 * n, steps // 2: 128 * n}
    times = BatchTime(slope, 0.2 * slope * knee, 1.2 * slope * knee)
    return cluster_of(times, trace, noise), 64 * n, (Hooked(schedule(batches), ()),)
