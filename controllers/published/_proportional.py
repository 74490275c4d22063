"""`proportional`: the controller of dynamic batching, which scales each worker's batch by mean time over own time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Limits, Observation
from adaptive.base.split import split
from controllers._policy import Policy
from controllers.timing.seconds import active_of, check_times, seconds_of, shares_of
from controllers.timing.steady_times import SteadyTimes


class ProportionalState(NamedTuple):
    """State of `proportional`."""

    times: SteadyTimes
    upper: np.ndarray  # shape=(n,), int64: learned: the most examples at which a worker's throughput did not drop
    sizes_before: np.ndarray  # shape=(n,), int64: before the last change; 0 where there was none
    speed_before: np.ndarray  # shape=(n,), examples per second then


def proportional(
    *,
    dead_band: float = 0.05,
    smoothing: float = 0.2,
    window: int = 5,
    renormalize: bool = True,
    drop: float | None = 0.05,
) -> Policy:
    """Return a policy that scales each worker's batch by the mean step time over the worker's own.

        tau_k = mu_k - mean(mu),    b_k <- b_k - (b_k / mu_k) tau_k  =  b_k mean(mu) / mu_k

    where `mu_k` is a moving average of the step time since sizes last changed. Bounds are applied next, then the dead
    band: either all batches change, or none. Assumes that time is proportional to the batch.

    Args:
      dead_band: no change unless the largest relative change exceeds this.
      smoothing: the moving average's weight of a new time. (Not given in the paper.)
      window: number of steps at the sizes in force that a decision needs.
      renormalize: keep the global batch. As published (False) a change multiplies it by mean(1/X) mean(X) >= 1 where
        speeds are X.
      drop: if a worker's throughput falls by more than this fraction after its batch was raised, the previous batch
        becomes its upper bound. None: do not learn bounds. (Published: 0; measured times are too noisy for that.)

    Returns:
      A policy for a hook with each worker's compute seconds; shape=(n,). NaN where unknown.

    Raises:
      ValueError: an argument is out of range.

    References:
      Tyagi & Sharma 2020, "Taming Resource Heterogeneity in Distributed ML Training with Dynamic Batching", sections
      III-C and III-D. With `renormalize=True` it is also the rule of DBS and DLB, share_k / t_k.
    """
    if dead_band < 0 or not 0 < smoothing <= 1 or window < 1:
        raise ValueError(
            f"proportional: dead_band >= 0, 0 < smoothing <= 1 and window >= 1 must hold; got {dead_band}, {smoothing} "
            f"and {window}."
        )

    def init(n: int) -> ProportionalState:
        unbounded = np.full(n, np.iinfo(np.int64).max)
        return ProportionalState(SteadyTimes.init(n), unbounded, np.zeros(n, np.int64), np.full(n, np.nan))

    def update(observation: Observation, state: ProportionalState) -> tuple[Decision | None, ProportionalState]:
        seconds = seconds_of(observation)
        sizes = np.asarray(observation.previous_batch_sizes)
        times = state.times.observe(sizes, seconds, smoothing)
        were = state.times.sizes > 0
        if (sizes != state.times.sizes).any() and were.any() and (state.times.taken[were] > 0).all():
            state = state._replace(sizes_before=state.times.sizes, speed_before=state.times.sizes / state.times.mean)
        state = state._replace(times=times)
        if not observation.due or not times.ready(observation.batch_sizes, window):
            return None, state
        if drop is not None:
            state = state._replace(upper=_learn_upper(state, drop))
        return decide(observation, state), state

    def decide(observation: Observation, state: ProportionalState) -> Decision | None:
        total, limits, active = observation.global_batch, observation.limits, active_of(observation)
        least, most, before = (np.asarray(a)[active] for a in (limits.lower, limits.upper, observation.batch_sizes))
        if not before.all():  # a worker has just become active
            return None
        before = before * (total / before.sum())
        wanted = proportional_step(before, state.times.mean[active])
        upper = np.clip(state.upper[active], least, most)
        wanted = np.clip(wanted * (total / wanted.sum()) if renormalize else wanted, least, upper)
        total = total if renormalize else round(wanted.sum())
        if not least.sum() <= total <= upper.sum():  # infeasible: use the program's bounds, which are feasible
            upper = most
        within = Limits(tuple(least.tolist()), tuple(upper.tolist()), limits.quantum)
        split_of = split(total, wanted.tolist(), within)
        sizes = shares_of(np.asarray(split_of), active, len(limits.lower))
        # Compare the resulting sizes, because a change that the bounds prevent would be requested in every step.
        if np.max(np.abs(np.asarray(split_of) - before) / before) <= dead_band or sizes == observation.batch_sizes:
            return None
        changed = total if total != observation.global_batch else None
        return Decision(global_batch=changed, shares=sizes)

    return Policy(init, update, "proportional", ("seconds",), check_times)


def proportional_step(sizes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the control law's new batches, as real numbers: `b - (b / t) (t - mean(t))`."""
    return sizes - sizes / seconds * (seconds - seconds.mean())


def _learn_upper(state: ProportionalState, drop: float) -> np.ndarray:
    raised = (state.times.sizes > state.sizes_before) & (state.sizes_before > 0)
    dropped = raised & (state.times.sizes / state.times.mean < (1 - drop) * state.speed_before)
    return np.where(dropped, np.minimum(state.upper, state.sizes_before), state.upper)
