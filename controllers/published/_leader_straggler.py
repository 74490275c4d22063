"""`leader_straggler`: move a few examples at a time from the slowest worker to the fastest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Observation
from adaptive.base.split import split
from controllers._policy import Policy
from controllers.timing.seconds import active_of, check_times, inputs_of, seconds_of
from controllers.timing.steady_times import SteadyTimes

LONGEST_WINDOW = 64


class LeaderStragglerState(NamedTuple):
    """State of `leader_straggler`."""

    times: SteadyTimes
    step: np.ndarray  # shape=(), int64: number of examples to move
    window: np.ndarray  # shape=(), int64: number of steps to average over
    pair: np.ndarray  # shape=(2,), int64: the leader and the straggler of the last change; -1 before it
    rest: np.ndarray  # shape=(), the relative gap at which it stopped; NaN while it is active


def leader_straggler(*, step: int = 5, window: int = 10, gap: float = 0.03, min_free_bytes: float = 0.0) -> Policy:
    """Return a policy that moves a few examples from the slowest worker to the fastest until their times are equal.

        L = argmin_k t_k  over workers with free memory,    S = argmax_k t_k
        b_L <- b_L + D,   b_S <- b_S - D;    D <- max(1, D // 2) and a longer average once S and L swap

    Uses no model of times. For accelerators, whose times are neither proportional to the batch nor change often.

    Args:
      step: initial D, also used again when times diverge after convergence.
      window: initial number of steps at the present sizes to average over.
      gap: no change while (max t - min t) / mean t is below this; or, once D is 1 and S and L would swap again, until
        this ratio has grown by `gap`.
      min_free_bytes: a worker with less free memory than this gets no more examples, if the hook has free bytes.

    Returns:
      A policy for a hook with each worker's compute seconds, shape=(n,), and optionally its free bytes, shape=(n,),
      such as `comm.all_gather(mon.memory_available())`.

    Raises:
      ValueError: an argument is out of range.

    References:
      Chen et al. 2020, "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments"
      (LB-BSP), section 3.3.2.
    """
    if step < 1 or not 1 <= window <= LONGEST_WINDOW or gap < 0 or min_free_bytes < 0:
        raise ValueError(
            f"leader_straggler: step must be at least 1, window from 1 to {LONGEST_WINDOW}, gap and min_free_bytes "
            f"not negative; got {step}, {window}, {gap} and {min_free_bytes}."
        )

    def init(n_workers: int) -> LeaderStragglerState:
        parts = np.asarray(step), np.asarray(window), np.full(2, -1), np.asarray(np.nan)
        return LeaderStragglerState(SteadyTimes.init(n_workers), *parts)

    def update(observation: Observation, state: LeaderStragglerState) -> tuple[Decision | None, LeaderStragglerState]:
        seconds = seconds_of(observation)
        further = inputs_of(observation)
        free = further[:, 0] if further.shape[1] else np.full(len(seconds), np.inf)
        times = state.times.observe(np.asarray(observation.previous_batch_sizes), seconds)
        state = state._replace(times=times)
        active = active_of(observation)
        if not observation.due or len(active) == 1 or not np.asarray(observation.batch_sizes)[active].all():
            return None, state  # a single worker, or one that has just become active
        if not times.ready(observation.batch_sizes, int(state.window)):
            return None, state
        return decide(observation, state, ~(free < min_free_bytes))  # NaN, unknown, counts as enough memory

    def decide(
        observation: Observation, state: LeaderStragglerState, has_memory: np.ndarray
    ) -> tuple[Decision | None, LeaderStragglerState]:
        limits, means = observation.limits, state.times.mean
        active = means[active_of(observation)]
        sizes = np.array(split(observation.global_batch, observation.batch_sizes, limits))
        lead = np.where((sizes < limits.upper) & has_memory, means, np.inf)
        lag = np.where(sizes > limits.lower, means, -np.inf)
        leader, straggler = int(np.argmin(lead)), int(np.argmax(lag))
        apart = float((active.max() - active.min()) / active.mean())
        if apart < gap or not lead[leader] < lag[straggler]:
            return None, state
        if not np.isnan(state.rest):
            if apart < state.rest + gap:
                return None, state
            state = init(len(sizes))._replace(times=state.times)
        if (state.pair == (straggler, leader)).all():
            if state.step == 1:
                return None, state._replace(rest=np.asarray(apart))
            longer = np.minimum(2 * state.window, LONGEST_WINDOW)
            state = state._replace(step=np.maximum(state.step // 2, 1), window=longer)
        moved = min(int(state.step), sizes[straggler] - limits.lower[straggler], limits.upper[leader] - sizes[leader])
        sizes[leader] += moved
        sizes[straggler] -= moved
        return Decision(shares=tuple(map(float, sizes))), state._replace(pair=np.array([leader, straggler]))

    reads = ("seconds", "memory_available")[: 1 + (min_free_bytes > 0)]
    return Policy(init, update, "leader_straggler", reads, check_times)
