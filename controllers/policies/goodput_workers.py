"""`goodput_workers`: the number of workers and the global batch with the fastest training progress.

Extends `goodput_batch` to the number of workers. A step of n workers takes as long as the slowest one computes, with
the best split of the batch, and the exchange among n workers, as far as it does not overlap with computing; the first
falls with n, the second grows. The gain of another worker is compared with the average gain per worker so far.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Observation
from controllers._policy import Policy
from controllers.timing._allocate import fill
from controllers.timing._batch_time import BatchTime
from controllers.timing._time_model import TimeModel
from controllers.timing.exchange import Exchange
from controllers.timing.seconds import active_of

from .efficiency import Bounds, efficiency, round_batch
from .goodput import CANDIDATES, check_signals, observe_exchange, read_signals, step_time_of_larger
from .noise_workers import check_workers, within_growth, worker_bounds

MOST_NUMBERS = 12  # numbers of workers that one decision compares


class GoodputWorkersState(NamedTuple):
    """State of `goodput_workers`: a model of each worker's step times, and of the exchange by number of workers."""

    times: TimeModel
    exchange: Exchange


class _Team(NamedTuple):
    """A candidate set of active workers."""

    times: BatchTime  # shape=(k,)
    lower: np.ndarray  # shape=(k,)
    upper: np.ndarray  # shape=(k,)

    def seconds(self, batch: int) -> float:
        """Return the seconds that the slowest worker computes, with the best split."""
        batch = min(max(batch, int(self.lower.sum())), int(self.upper.sum()))
        return float(self.times(fill(batch, self.times, self.lower, self.upper)).max())


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

    The goodput is examples per second times progress per example.

        noise = mon.noise_scale(grads, avg_grads)
        seconds = comm.all_gather(mon.compute_seconds())
        iteration = comm.all_reduce(mon.iteration_seconds(), op="max")
        ctrl.hook(ctrl.goodput_workers(), noise, seconds, iteration, every=50)

    Step times are learned for each worker as in `balance`, and the batch is assumed to be split as `balance` splits it;
    for workers that were never measured the mean of the others is used. The exchange's dependence on the number of
    workers is learned whenever that number changes, and how much of it overlaps with computing whenever the batch or
    the number does, as in `goodput_batch`. While requested workers have not arrived or have not been measured,
    the policy waits.

    Args:
      min_workers, max_workers: bounds; by default the available workers.
      min_batch, max_batch: bounds; by default what the workers can hold.
      growth: largest factor by which one decision may change the batch and the number of workers.
      gain: least expected ratio of new to old goodput for a change; more is required for more workers.
      factor: the noise scale is multiplied by this, for instance by a measured critical batch over the noise scale.
      worth: from 0 to 1, required marginal gain of a worker relative to the average gain per worker: p percent more
        workers must bring more than `worth * p` percent more goodput. With 0 every worker with any gain is used.
      multiple: batches are multiples of this; by default of the quantum times the number of workers.

    Returns:
      A policy for a hook with a noise scale, the workers' compute seconds, shape=(n,), and the seconds of a whole
      iteration.

    Raises:
      ValueError: an argument is out of range.

    References:
      Qiao et al. 2021, "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", sections 3 and 4.
    """
    if growth <= 1 or gain < 1 or factor <= 0 or not 0 <= worth <= 1:
        raise ValueError(
            "goodput_workers: growth and factor must be above 1 and 0, gain at least 1 and worth from 0 to 1; got "
            f"{growth}, {factor}, {gain} and {worth}."
        )
    check_workers("goodput_workers", min_workers, max_workers)

    def init(n_workers: int) -> GoodputWorkersState:
        return GoodputWorkersState(TimeModel.init(n_workers), Exchange.init())

    def update(observation: Observation, state: GoodputWorkersState) -> tuple[Decision | None, GoodputWorkersState]:
        noise, seconds, iteration = read_signals(observation, "goodput_workers")
        sizes = np.asarray(observation.previous_batch_sizes)
        times = state.times.observe(sizes, seconds)
        exchange = observe_exchange(state.exchange, sizes, seconds, iteration)
        state = GoodputWorkersState(times, exchange)
        settled = observation.target_workers == len(observation.members)
        active = active_of(observation)
        measured = times.measured[active].all() and exchange.known and exchange.workers == len(active)
        if not (observation.due and settled and noise.known and measured):
            return None, state
        return decide(observation, noise, state), state

    def decide(observation: Observation, noise: Bounds, state: GoodputWorkersState) -> Decision | None:
        now, there, fit = observation.global_batch, len(observation.members), state.times.fit()
        teams = {n: _team(observation, fit, n) for n in numbers(observation)}
        base, known = teams[there], state.exchange.fit()
        larger = step_time_of_larger(state.exchange, known)
        best, most_gain = (there, now), gain
        for n, team in teams.items():
            price = 1 - worth + worth * n / there
            for batch in batches(observation, team, now):
                phi = factor * (noise.lower if batch > now else noise.upper)
                step_time = larger if batch > now and n == there else known
                # Both by one model: what it assumes of the overlap also changes the time of the present batch.
                faster = step_time(len(base.lower), base.seconds(now))
                faster /= step_time(len(team.lower), team.seconds(batch))
                ratio = batch / now * faster * efficiency(phi, batch, now) / price
                if ratio > most_gain and (n, batch) != (there, now):
                    best, most_gain = (n, batch), ratio
        if best == (there, now):
            return None
        workers, batch = best
        goodput = most_gain * (1 - worth + worth * workers / there)
        changes = [f"workers {there} to {workers}"] * (workers != there) + [f"batch {now} to {batch}"] * (batch != now)
        note = f"{', '.join(changes)}: {goodput:.2f} times the goodput at a noise scale of {factor * noise.scale:.4g}"
        return Decision(global_batch=batch, workers=None if workers == there else workers, notes=(note,))

    def numbers(observation: Observation) -> list[int]:
        """Return the numbers of workers to compare, including the current one."""
        there = len(observation.members)
        least, most = worker_bounds(observation, min_workers, max_workers)
        low = max(least, round(within_growth(1, there, there, growth)))
        high = min(most, round(within_growth(most, there, there, growth)))
        few = np.unique(np.geomspace(low, max(low, high), MOST_NUMBERS).round().astype(int))
        near = [n for n in (there - 1, there + 1) if low <= n <= high]
        return sorted({*few.tolist(), *near, there})

    def batches(observation: Observation, team: _Team, now: int) -> list[int]:
        least, most = int(team.lower.sum()), min(int(team.upper.sum()), observation.limits.examples)
        low = min(max(least, min_batch or least), most)
        high = max(min(most, max_batch or most), low)
        reach = np.geomspace(max(now / growth, low), max(min(now * growth, high), low), CANDIDATES)
        step = multiple or observation.limits.quantum * len(team.lower)
        return sorted(
            {round_batch(float(b), step, low, high) for b in reach} | ({now} if low <= now <= high else set())
        )

    reads = ("noise_scale", "seconds", "iteration_seconds")
    return Policy(init, update, "goodput_workers", reads, check_signals)


def _team(observation: Observation, fit: BatchTime, workers: int) -> _Team:
    """Return the active workers if there were `workers` members.

    The highest slots leave first, and the lowest free slots are filled; members that take no examples stay that way.
    """
    n, there, limits = len(observation.batch_sizes), observation.members, observation.limits
    active = active_of(observation)
    free = [slot for slot in range(n) if slot not in there]
    slots = [*there, *free[: max(0, workers - len(there))]][:workers]
    slots = [slot for slot in slots if slot in active or slot not in there] or active[:1].tolist()
    rows = np.stack([np.broadcast_to(np.asarray(part, np.float64), n) for part in fit])  # slope, intercept, floor
    rows = np.where(np.isfinite(rows), rows, rows[:, active].mean(axis=1, keepdims=True))[:, slots]
    lower, upper = np.array(limits.lower), np.array(limits.upper)
    new = ~np.isin(np.arange(n), active)
    lower, upper = (np.where(new, bound[active].min(), bound)[slots] for bound in (lower, upper))
    return _Team(BatchTime(*rows), lower, upper)
