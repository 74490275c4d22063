"""`goodput_batch`: the global batch with the fastest training progress on these machines.

Examples per second rise with the batch, as the fixed cost of a step is spread over more of them; the progress per
example falls once the batch is larger than the noise scale. Their product, the *goodput*, has a maximum. With balanced
workers and linear step times, a step takes `T(B) = a + B/V`, and

    goodput(B) = B / (a + B/V) * (phi + M) / (phi + B)        is largest at   B* = sqrt(phi * V * a):

the geometric mean of the noise scale phi and of `V * a`, the batch at which half the time is overhead. If the exchange
overlaps with computing, a batch below that for which it is hidden gains little, so the best one is nearer to it.
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
from controllers.timing._time_model import TimeModel
from controllers.timing.exchange import MOST_OVERLAP, Exchange, StepTime
from controllers.timing.seconds import active_of, shape_of

from .efficiency import Bounds, check_noise, efficiency, read_noise, round_batch
from .noise_batch import batch_bounds, batch_multiple

CANDIDATES = 25
UNKNOWN_TIME = 0.25  # relative standard deviation of a predicted time, above which a batch is not made smaller


class GoodputState(NamedTuple):
    """State of `goodput_batch`: models of the workers' compute times, and of the exchange."""

    times: TimeModel
    exchange: Exchange


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
    factor: float = 1.0,
    multiple: int | None = None,
) -> Policy:
    """Return a policy that sets the global batch by goodput: examples per second times progress per example.

    If communication is slow or workers have large fixed costs, the batch exceeds the noise scale; if machines are busy
    with few examples, it stays below.

        noise = mon.noise_scale(grads, avg_grads)
        seconds = comm.all_gather(mon.compute_seconds())
        iteration = comm.all_reduce(mon.iteration_seconds(), op="max")
        ctrl.hook(ctrl.goodput_batch(), noise, seconds, iteration, every=50)

    Step times are learned as in `balance`, and the batch is assumed to be split as `balance` splits it. How much of the
    exchange overlaps with computing is learned when the batch changes: a step takes `(C^g + X^g)^(1/g)` seconds, where
    C is the slowest worker's compute time, X the exchange and g from 1 (no overlap) to 10. Before the first change, a
    larger batch is judged with g = 10, so that it is tried where it may pay. The expected gain of a larger batch uses
    the noise scale's lower bound, that of a smaller one the upper bound. Pass the noise scale of the
    optimizer in use: `mon.noise_scale(…, divide_by=mon.adam_scale(opt_state))` for Adam; see "Which noise scale?" in
    the documentation.

    Args:
      min_batch, max_batch: bounds; by default what the workers can hold.
      growth: largest factor by which one decision may grow or shrink the batch.
      gain: least expected ratio of new to old goodput for a change.
      factor: the noise scale is multiplied by this, for instance by a measured critical batch over the noise scale
        (`measure_critical_batch`), which was between 1 and 4 on three small tasks.
      multiple: batches are multiples of this; by default of the quantum times the number of workers.

    Returns:
      A policy for a hook with a noise scale (an object with `scale`, `lower` and `upper`, or a number), the workers'
      compute seconds, shape=(n,), and the seconds of a whole iteration.

    Raises:
      ValueError: `growth`, `gain` or `factor` is out of range.

    References:
      Qiao et al. 2021, "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", section 3.
    """
    if growth <= 1 or gain < 1 or factor <= 0:
        raise ValueError(
            "goodput_batch: growth must be above 1, gain at least 1 and factor above 0; got "
            f"{growth}, {gain} and {factor}."
        )

    def init(n_workers: int) -> GoodputState:
        return GoodputState(TimeModel.init(n_workers), Exchange.init())

    def update(observation: Observation, state: GoodputState) -> tuple[Decision | None, GoodputState]:
        noise, seconds, iteration = read_signals(observation, "goodput_batch")
        sizes = np.asarray(observation.previous_batch_sizes)
        times = state.times.observe(sizes, seconds)
        state = GoodputState(times, observe_exchange(state.exchange, sizes, seconds, iteration))
        if not observation.due:
            return None, state
        if not (noise.known and state.times.measured[active_of(observation)].all() and state.exchange.known):
            return None, state
        return decide(observation, noise, state), state

    def decide(observation: Observation, noise: Bounds, state: GoodputState) -> Decision | None:
        now, step = observation.global_batch, multiple or batch_multiple(observation)
        least, most = batch_bounds(observation, min_batch, max_batch)
        times, known = state.times.of(active_of(observation)), state.exchange.fit()
        fit, larger = times.fit(), step_time_of_larger(state.exchange, known)
        reach = np.geomspace(max(now / growth, least), max(min(now * growth, most), least), CANDIDATES)
        best, most_gain = now, gain
        present = np.asarray(observation.batch_sizes)[active_of(observation)]
        seconds_now = float(fit(split_of(now, fit, observation)).max())
        for batch in sorted({round_batch(float(b), step, least, most) for b in reach} - {now}):
            if batch < now and (times.variance(present * (batch / now)) > UNKNOWN_TIME**2).any():
                continue
            sizes, step_time = split_of(batch, fit, observation), larger if batch > now else known
            phi = factor * (noise.lower if batch > now else noise.upper)
            # Both batches by one model: what it assumes of the overlap also changes the time of the present one.
            faster = step_time(len(sizes), seconds_now) / step_time(len(sizes), float(fit(sizes).max()))
            ratio = batch / now * faster * efficiency(phi, batch, now)
            if ratio > most_gain:
                best, most_gain = batch, ratio
        if best == now:
            return None
        note = (
            f"batch {now} to {best}: {most_gain:.2f} times the goodput at a noise scale of {factor * noise.scale:.4g}"
        )
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


def observe_exchange(exchange: Exchange, sizes: np.ndarray, seconds: np.ndarray, iteration: float) -> Exchange:
    """Return the exchange's model after a step.

    Args:
      exchange: the model before.
      sizes: batch sizes of the step; int, shape=(n,).
      seconds: compute seconds of each worker; shape=(n,). The step is skipped if one with examples is unknown.
      iteration: seconds of the whole step; NaN if unknown.
    """
    took = sizes > 0
    busy = seconds[took]
    known = (busy > 0).all() and (busy < np.inf).all() and took.any()
    return exchange.see(int(took.sum()), int(sizes.sum()), float(busy.max()) if known else math.nan, iteration)


def step_time_of_larger(exchange: Exchange, known: StepTime) -> StepTime:
    """Return the model for batches larger than the present one: `known`, or before the first change of the batch or of
    the workers the one with the most overlap.
    """
    return exchange.fit(MOST_OVERLAP) if exchange.single else known


def split_of(batch: int, times: BatchTime, observation: Observation) -> np.ndarray:
    """Return the sizes of the active workers that take the least time for a batch; shape=(active,)."""
    active, limits = active_of(observation), observation.limits
    lower, upper = np.asarray(limits.lower)[active], np.asarray(limits.upper)[active]
    return fill(min(max(batch, int(lower.sum())), int(upper.sum())), times, lower, upper)
