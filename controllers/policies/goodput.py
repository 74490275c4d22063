"""`goodput_batch`: the global batch with the fastest training progress on these machines.

Examples per second rise with the batch, as the fixed cost of a step is spread over more of them; the progress per
example falls once the batch is larger than the noise scale. Their product, the *goodput*, has a maximum. With balanced
workers and linear step times, a step takes `T(B) = a + B/V`, and

    goodput(B) = B / (a + B/V) * (phi + M) / (phi + B)        is largest at   B* = sqrt(phi * V * a):

the geometric mean of the noise scale phi and of `V * a`, the batch at which half the time is overhead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive import DriverError
from adaptive.extend import Decision, Observation
from controllers._policy import Policy
from controllers.timing.allocate import fill
from controllers.timing.batch_time import BatchTime
from controllers.timing.exchange import average
from controllers.timing.seconds import active_of, shape_of
from controllers.timing.time_model import TimeModel

from .efficiency import Bounds, check_noise, efficiency, read_noise, round_batch
from .noise_batch import batch_bounds, batch_multiple

CANDIDATES = 25


class GoodputState(NamedTuple):
    """State of `goodput_batch`: a model of the workers' step times, and the remaining time of a step."""

    times: TimeModel
    overhead: np.ndarray  # shape=(), mean seconds of a step in which the slowest worker does not compute; NaN at first


def best_goodput(noise_scale: float, examples_per_second: float, overhead_seconds: float) -> float:
    """Return the batch with the greatest goodput for step times of `overhead + B / speed`.

    It is `sqrt(noise * speed * overhead)`.

    >>> best_goodput(900, 2000, 0.05)
    300.0
    """
    return math.sqrt(noise_scale * examples_per_second * overhead_seconds)


def goodput_batch(
    *,
    min_batch: int | None = None,
    max_batch: int | None = None,
    growth: float = 2.0,
    gain: float = 1.05,
    multiple: int | None = None,
) -> Policy:
    """Return a policy that sets the global batch by goodput: examples per second times progress per example.

    If communication is slow or workers have large fixed costs, the batch exceeds the noise scale; if machines are busy
    with few examples, it stays below.

        noise = mon.noise_scale(grads, avg_grads)
        seconds = comm.all_gather(mon.compute_seconds())
        iteration = comm.all_reduce(mon.iteration_seconds(), op="max")
        ctrl.hook(ctrl.goodput_batch(), noise, seconds, iteration, every=50)

    Step times are learned as in `balance`, and the batch is assumed to be split as `balance` splits it. The expected
    gain of a larger batch uses the noise scale's lower bound, that of a smaller one the upper bound.

    Args:
      min_batch, max_batch: bounds; by default what the workers can hold.
      growth: largest factor by which one decision may grow or shrink the batch.
      gain: least expected ratio of new to old goodput for a change.
      multiple: batches are multiples of this; by default of the quantum times the number of workers.

    Returns:
      A policy for a hook with a noise scale, the workers' compute seconds, shape=(n,), and the seconds of a whole
      iteration.

    Raises:
      ValueError: `growth` or `gain` is out of range.

    References:
      Qiao et al. 2021, "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", section 3.
    """
    if growth <= 1 or gain < 1:
        raise ValueError(f"goodput_batch: growth must be above 1 and gain at least 1; got {growth} and {gain}.")

    def init(n_workers: int) -> GoodputState:
        return GoodputState(TimeModel.init(n_workers), np.asarray(np.nan))

    def update(observation: Observation, state: GoodputState) -> tuple[Decision | None, GoodputState]:
        noise, seconds, iteration = read_signals(observation, "goodput_batch")
        sizes = np.asarray(observation.previous_batch_sizes)
        times = state.times.observe(sizes, seconds, observation.due)
        state = GoodputState(times, average(state.overhead, idle_seconds(seconds[sizes > 0], iteration)))
        if not observation.due:
            return None, state
        if not (noise.known and state.times.measured[active_of(observation)].all() and state.overhead >= 0):
            return None, state
        return decide(observation, noise, state), state

    def decide(observation: Observation, noise: Bounds, state: GoodputState) -> Decision | None:
        now, step = observation.global_batch, multiple or batch_multiple(observation)
        least, most = batch_bounds(observation, min_batch, max_batch)
        fit, overhead = state.times.of(active_of(observation)).fit(), float(state.overhead)
        reach = np.geomspace(max(now / growth, least), max(min(now * growth, most), least), CANDIDATES)
        best, most_gain = now, gain
        throughput_now = now / (_step_seconds(now, fit, observation) + overhead)
        for batch in sorted({round_batch(float(b), step, least, most) for b in reach} - {now}):
            phi = noise.lower if batch > now else noise.upper
            throughput = batch / (_step_seconds(batch, fit, observation) + overhead)
            ratio = throughput / throughput_now * efficiency(phi, batch, now)
            if ratio > most_gain:
                best, most_gain = batch, ratio
        if best == now:
            return None
        note = f"batch {now} to {best}: {most_gain:.2f} times the goodput at a noise scale of {noise.scale:.4g}"
        return Decision(global_batch=best, notes=(note,))

    return Policy(init, update, "goodput_batch", ("noise_scale", "seconds", "iteration_seconds"), check_signals)


def read_signals(observation: Observation, policy: str) -> tuple[Bounds, np.ndarray, float]:
    """Return the hook's values: the noise scale, the workers' compute seconds, shape=(n,), and an iteration's seconds.

    Args:
      observation: the observation with the hook's values.
      policy: the policy's name, for errors.
    """
    values = observation.values
    _check_values(values, len(observation.batch_sizes), policy)
    return (
        read_noise(values[0], policy),
        np.asarray(values[1], np.float64),
        float(np.fmax.reduce(np.ravel(values[2]))),
    )  # free worker slots have none


def check_signals(values: Sequence[Any], n_workers: int, policy: str) -> None:
    """Check that a hook's values can be those of a goodput policy: for policies' `check`.

    Raises:
      DriverError: their number, a shape or a type is wrong.
    """
    _check_values(values, n_workers, policy)
    check_noise(values, n_workers, policy)


def _check_values(values: Sequence[Any], n: int, policy: str) -> None:
    if len(values) == 3 and shape_of(values[1]) == (n,) and math.prod(shape_of(values[2])) in (1, n):
        return
    shapes = ", ".join(str(shape_of(value)) for value in values)
    raise DriverError(
        f"{policy} reads a noise scale, {n} compute times and one iteration time; got {len(values)} values"
        f"{f' of shapes {shapes}' if values else ''}. For instance:\n"
        f"    seconds = comm.all_gather(mon.compute_seconds())\n"
        f"    iteration = comm.all_reduce(mon.iteration_seconds(), op='max')\n"
        f"    ctrl.hook(ctrl.{policy}(), noise, seconds, iteration)"
    )


def idle_seconds(seconds: np.ndarray, iteration: float) -> float:
    """Return the seconds of an iteration in which no worker computes; NaN if an active worker's time is unknown."""
    known = np.isfinite(iteration) and (seconds > 0).all() and (seconds < np.inf).all()
    return iteration - float(seconds.max()) if known else math.nan


def _step_seconds(batch: int, times: BatchTime, observation: Observation) -> float:
    active, limits = active_of(observation), observation.limits
    lower, upper = np.asarray(limits.lower)[active], np.asarray(limits.upper)[active]
    batch = min(max(batch, int(lower.sum())), int(upper.sum()))
    return float(times(fill(batch, times, lower, upper)).max())
