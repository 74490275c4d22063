"""`goodput_batch` and `goodput_workers`: the global batch, and the number of workers, of the fastest training progress.

Examples per second rise with the batch; the progress per example falls once the batch is larger than the noise scale.
Their product is the *goodput*. With balanced workers and linear step times, a step takes `T(B) = a + B/V`, and

    goodput(B) = B / (a + B/V) * (phi + M) / (phi + B)        is largest at   B* = sqrt(phi * V * a)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive import DriverError
from adaptive.base.decision import Decision, Observation
from controllers._policy import Policy
from controllers.timing._allocate import fill
from controllers.timing._batch_time import BatchTime
from controllers.timing._efficiency import efficiency
from controllers.timing._time_model import TimeModel
from controllers.timing.exchange import Exchange
from controllers.timing.seconds import active_of, shape_of

from .noise import Bounds, check_bounds, check_noise, read_noise, round_batch, within, within_growth

CANDIDATES = 25  # batches that one decision compares, for each number of workers
MOST_NUMBERS = 12  # numbers of workers that one decision compares
UNKNOWN_TIME = 0.25  # relative standard deviation of a predicted time, above which a batch is not made smaller


def goodput_batch(
    *,
    min_batch: int | None = None,
    max_batch: int | None = None,
    growth: float = 2.0,
    gain: float = 1.05,
    factor: float = 1.0,
    multiple: int | None = None,
) -> Policy:
    """Return a policy that sets the global batch by goodput: examples per second times progress per example.

        noise = mon.noise_scale(grads, avg_grads)
        seconds = comm.all_gather(mon.compute_seconds())
        iteration = comm.all_reduce(mon.iteration_seconds(), op="max")
        ctrl.hook(ctrl.goodput_batch(), noise, seconds, iteration, every=50)

    Step times are learned as in `balance`, which is assumed to split the batch; the seconds besides computing are
    assumed not to depend on it. The expected gain of a larger batch uses the noise scale's lower bound, that of a
    smaller one the upper bound. Pass the noise scale of the optimizer in use: for Adam
    `mon.noise_scale(…, divide_by=mon.adam_scale(opt_state))`.

    Args:
      min_batch, max_batch: bounds; by default what the workers can hold.
      growth: largest factor by which one decision may grow or shrink the batch.
      gain: least expected ratio of new to old goodput for a change.
      factor: the noise scale is multiplied by this, for instance by a measured critical batch over the noise scale
        (`measure_critical_batch`).
      multiple: batches are multiples of this; by default of the quantum times the number of workers.

    Returns:
      A policy for a hook with a noise scale (an object with `scale`, `lower` and `upper`, or a number), the workers'
      compute seconds, shape=(n,), and the seconds of a whole iteration.

    Raises:
      ValueError: an argument is out of range.

    References:
      Qiao et al. 2021, "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", section 3.
    """
    return _policy(_Rule("goodput_batch", growth, gain, factor, multiple, min_batch, max_batch))


def goodput_workers(
    *,
    min_workers: int | None = None,
    max_workers: int | None = None,
    min_batch: int | None = None,
    max_batch: int | None = None,
    growth: float = 2.0,
    gain: float = 1.05,
    factor: float = 1.0,
    worth: float = 0.5,
    multiple: int | None = None,
) -> Policy:
    """Return a policy that sets the number of workers and the global batch by goodput.

        ctrl.hook(ctrl.goodput_workers(), noise, seconds, iteration, every=50)

    As `goodput_batch`; for workers that were never measured the mean of the others is used. How the exchange depends on
    the number of workers is learned when that changes. The policy waits until requested workers are measured.

    Args:
      min_workers, max_workers: bounds; by default the available workers.
      min_batch, max_batch, growth, gain, factor, multiple: as for `goodput_batch`; more gain is required for more
        workers.
      worth: from 0 to 1: p percent more workers must bring more than `worth * p` percent more goodput.

    Returns:
      A policy for a hook with the values of `goodput_batch`.

    Raises:
      ValueError: an argument is out of range.

    References:
      Qiao et al. 2021, "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", sections 3 and 4.
    """
    if not 0 <= worth <= 1:
        raise ValueError(f"goodput_workers: worth must be from 0 to 1; got {worth}.")
    check_bounds("goodput_workers", "workers", min_workers, max_workers)
    rule = _Rule("goodput_workers", growth, gain, factor, multiple, min_batch, max_batch)
    return _policy(rule._replace(workers=(min_workers, max_workers), worth=worth))


class GoodputState(NamedTuple):
    """State of both policies: models of the workers' compute times, and of the exchange by number of workers."""

    times: TimeModel
    exchange: Exchange


class _Rule(NamedTuple):
    """The arguments of a policy."""

    name: str
    growth: float
    gain: float
    factor: float
    multiple: int | None
    min_batch: int | None
    max_batch: int | None
    workers: tuple[int | None, int | None] | None = None  # bounds of their number; None: it is left alone
    worth: float = 0.0


def _policy(rule: _Rule) -> Policy:
    if not (rule.growth > 1 and rule.gain >= 1 and rule.factor > 0 and (rule.multiple is None or rule.multiple >= 1)):
        raise ValueError(
            f"{rule.name}: growth must be above 1, gain at least 1, factor above 0 and multiple at least 1; got "
            f"{rule.growth}, {rule.gain}, {rule.factor} and {rule.multiple}."
        )
    check_bounds(rule.name, "batch", rule.min_batch, rule.max_batch)

    def init(n_workers: int) -> GoodputState:
        return GoodputState(TimeModel.init(n_workers), Exchange.init())

    def update(observation: Observation, state: GoodputState) -> tuple[Decision | None, GoodputState]:
        noise, seconds = read_noise(observation.values[0]), np.asarray(observation.values[1], np.float64)
        iteration = float(np.fmax.reduce(np.ravel(observation.values[2])))  # free worker slots have none
        sizes, active = np.asarray(observation.previous_batch_sizes), active_of(observation)
        busy = seconds[sizes > 0]
        slowest = float(busy.max()) if busy.size and (busy > 0).all() else math.nan
        exchange = state.exchange.see(busy.size, int(sizes.sum()), slowest, iteration)
        times = state.times.observe(sizes, seconds)
        state = GoodputState(times, exchange)
        settled = rule.workers is None or observation.target_workers == len(observation.members)
        measured = times.measured[active].all() and exchange.known and exchange.workers == len(active)
        if not (observation.due and settled and noise.known and measured):
            return None, state
        return _decision(rule, observation, noise, state), state

    return Policy(init, update, rule.name, ("noise_scale", "seconds", "iteration_seconds"), _check)


def _decision(rule: _Rule, observation: Observation, noise: Bounds, state: GoodputState) -> Decision | None:
    """Return the number of workers and the batch with the greatest goodput, if it is worth a change."""
    now, there, fit = observation.global_batch, len(observation.members), state.times.fit()
    base, active = _team(observation, fit, there), active_of(observation)
    seconds_now = base.seconds(now) + state.exchange.seconds(len(base.lower))
    own, present = state.times.of(active), np.asarray(observation.batch_sizes)[active]
    best, most_gain = (there, now), rule.gain
    for n in _numbers(rule, observation):
        team = base if n == there else _team(observation, fit, n)
        price = 1 - rule.worth + rule.worth * n / there
        for batch in _batches(rule, observation, team):
            if n == there and batch < now and (own.variance(present * (batch / now)) > UNKNOWN_TIME**2).any():
                continue
            seconds = team.seconds(batch) + state.exchange.seconds(len(team.lower))
            phi = rule.factor * (noise.lower if batch > now else noise.upper)
            ratio = batch / now * seconds_now / seconds * efficiency(phi, batch, now) / price
            if ratio > most_gain and (n, batch) != (there, now):
                best, most_gain = (n, batch), ratio
    if best == (there, now):
        return None
    n, batch = best
    goodput = most_gain * (1 - rule.worth + rule.worth * n / there)
    changes = [f"workers {there} to {n}"] * (n != there) + [f"batch {now} to {batch}"] * (batch != now)
    note = f"{', '.join(changes)}: {goodput:.2f} times the goodput at a noise scale of {rule.factor * noise.scale:.4g}"
    return Decision(global_batch=batch, workers=None if n == there else n, notes=(note,))


class _Team(NamedTuple):
    """A candidate set of active workers."""

    times: BatchTime  # shape=(k,)
    lower: np.ndarray  # shape=(k,)
    upper: np.ndarray  # shape=(k,)

    def seconds(self, batch: int) -> float:
        """Return the seconds that the slowest worker computes, with the best split."""
        batch = min(max(batch, int(self.lower.sum())), int(self.upper.sum()))
        return float(self.times(fill(batch, self.times, self.lower, self.upper)).max())


def _team(observation: Observation, fit: BatchTime, workers: int) -> _Team:
    """Return the active workers if there were `workers` members: the highest slots leave, the lowest are filled."""
    n, there, limits = len(observation.batch_sizes), observation.members, observation.limits
    active = active_of(observation)
    free = [slot for slot in range(n) if slot not in there]
    slots = [*there, *free[: max(0, workers - len(there))]][:workers]
    slots = [slot for slot in slots if slot in active or slot not in there] or active[:1].tolist()
    rows = np.stack([np.broadcast_to(np.asarray(part, np.float64), n) for part in fit])  # slope, intercept, floor
    rows = np.where(np.isfinite(rows), rows, rows[:, active].mean(axis=1, keepdims=True))[:, slots]
    new = ~np.isin(np.arange(n), active)
    lower, upper = (np.where(new, bound[active].min(), bound)[slots] for bound in limits.arrays[:2])
    return _Team(BatchTime(*rows), lower, upper)


def _numbers(rule: _Rule, observation: Observation) -> list[int]:
    """Return the numbers of workers to compare, including the current one."""
    there = len(observation.members)
    if rule.workers is None:
        return [there]
    least, most = within(*rule.workers, observation.least_workers, observation.most_workers)
    low = max(least, round(within_growth(1, there, there, rule.growth)))
    high = min(most, round(within_growth(most, there, there, rule.growth)))
    few = np.unique(np.geomspace(low, max(low, high), MOST_NUMBERS).round().astype(int))
    near = [n for n in (there - 1, there + 1) if low <= n <= high]
    return sorted({*few.tolist(), *near, there})


def _batches(rule: _Rule, observation: Observation, team: _Team) -> list[int]:
    now, least = observation.global_batch, int(team.lower.sum())
    most = min(int(team.upper.sum()), observation.limits.examples)
    low, high = within(rule.min_batch, rule.max_batch, least, most)
    reach = np.geomspace(max(now / rule.growth, low), max(min(now * rule.growth, high), low), CANDIDATES)
    step = rule.multiple or observation.limits.quantum * len(team.lower)
    return sorted({round_batch(float(b), step, low, high) for b in reach} | ({now} if low <= now <= high else set()))


def _check(values: Sequence[Any], n: int, policy: str) -> None:
    if not (len(values) == 3 and shape_of(values[1]) == (n,) and math.prod(shape_of(values[2])) in (1, n)):
        shapes = ", ".join(str(shape_of(value)) for value in values)
        raise DriverError(
            f"{policy} reads a noise scale, {n} compute times and one iteration time; got {len(values)} values"
            f"{f' of shapes {shapes}' if values else ''}. For instance:\n"
            f"    seconds = comm.all_gather(mon.compute_seconds())\n"
            f"    iteration = comm.all_reduce(mon.iteration_seconds(), op='max')\n"
            f"    ctrl.hook(ctrl.{policy}(), noise, seconds, iteration)"
        )
    check_noise(values, n, policy)
