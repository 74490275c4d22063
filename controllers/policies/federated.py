"""`federated`: local batches by the clients' speeds and the transfer times of their models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Observation
from controllers._policy import Policy
from controllers.predictors.base import Predictor, PredictorState, known, moving_average
from controllers.timing._allocate import allocate
from controllers.timing._batch_time import BatchTime
from controllers.timing.seconds import active_of, check_times, inputs_of, seconds_of, shares_of


class FederatedState(NamedTuple):
    """State of `federated`."""

    predictor: PredictorState
    speeds: np.ndarray  # shape=(n,), examples per second: the last prediction; NaN before the first


def federated(predictor: Predictor | None = None, *, dead_band: float = 0.05) -> Policy:
    """Return a policy that lets all clients of a federated round finish together.

    Slow clients, and clients with slow links, get fewer examples.

    A client's round is `tau` local steps on minibatches of x_i examples, at v_i examples per second, and then the
    transfer of its model. For a given number of examples per round it is shortest where

        tau x_i / v_i + comm_i = T  for all i,    that is    x_i = (T - comm_i) v_i / tau  within bounds

    and T is such that the x_i sum up. A local batch is `tau x_i` examples, and sizes are multiples of the program's
    quantum, which is `tau` (`ad.minibatches`), so `tau` is not a parameter. Solved exactly, in whole multiples, by
    `allocate`.

        def driver(state, batch):
            params, losses = jax.lax.scan(local_step, state, ad.minibatches(batch, tau))
            ctrl.hook(ctrl.federated(), comm.all_gather(mon.compute_seconds()), link_seconds)
            return comm.all_reduce(params), {"loss": comm.all_reduce(losses.mean())}

    You supply the transfer times, because a round does not show them: all clients wait until the last model has
    arrived, so `iteration_seconds - compute_seconds` is mostly the time that a client waited for *others*. Used as the
    client's own transfer time it would make every split look optimal. Supply what you know: bytes over the bandwidth of
    each client's link, or transfer times measured beforehand. A time that all clients have in common does not affect
    the split, and may be left out.

    Averaging weights models by their examples, so a client with fewer examples has less influence; see
    docs/federated.md.

    Args:
      predictor: predictor of speeds; by default `moving_average()` over the last rounds.
      dead_band: no change unless the round is expected to shorten by more than this fraction. A driver with
        `ad.minibatches` compiles every new size.

    Returns:
      A policy for a hook with each client's compute seconds, shape=(n,), and, if links differ, the seconds of its
      model's transfer, shape=(n,). Requests nothing while one of them is unknown (NaN).

    Raises:
      ValueError: `dead_band` is negative.

    References:
      Chen et al. 2021, IEEE Transactions on Cloud Computing, doi 10.1109/TCC.2021.3102593: LB-BSP for federated
      learning, which adapts the local batch and not the number of local steps. We do not know how it measures
      communication times.
    """
    if dead_band < 0:
        raise ValueError(f"federated: dead_band must not be negative; got {dead_band}.")
    rule = predictor if predictor is not None else moving_average()

    def init(n_workers: int) -> FederatedState:
        return FederatedState(rule.init(n_workers, 0), np.full(n_workers, np.nan))

    def update(observation: Observation, state: FederatedState) -> tuple[Decision | None, FederatedState]:
        seconds, further = seconds_of(observation, "federated"), inputs_of(observation, "federated")
        if further.shape[1] > 1:
            raise ValueError(
                "federated reads each client's compute seconds and the seconds of its model's transfer; got "
                f"{1 + further.shape[1]} values."
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            speed = np.asarray(observation.previous_batch_sizes) / seconds
        no_inputs = np.zeros((len(seconds), 0))
        speeds, memory = rule.update(state.predictor, np.where(known(speed), speed, np.nan), no_inputs)
        state = FederatedState(memory, speeds)
        communication = further[:, 0] if further.shape[1] else np.zeros(len(seconds))
        active = active_of(observation)
        speeds, communication = speeds[active], communication[active]
        if not observation.due or not known(speeds).all() or not (communication >= 0).all():
            return None, state
        return decide(observation, BatchTime(1 / speeds, communication), active), state

    def decide(observation: Observation, rounds: BatchTime, active: np.ndarray) -> Decision | None:
        total, limits = observation.global_batch, observation.limits
        lower, upper, sizes = (np.asarray(a)[active] for a in (limits.lower, limits.upper, observation.batch_sizes))
        if len(sizes) == 1 or not sizes.all() or not sum(limits.lower) <= total <= sum(limits.upper):
            return None
        stay = sizes * (total / sizes.sum())
        split = allocate(total, rounds, lower, upper, limits.quantum, near=stay)
        now, then = rounds(stay).max(), rounds(split).max()
        if not now - then > dead_band * now:
            return None
        note = f"a round is expected to take {then:.3g} s, down from {now:.3g} s"
        return Decision(shares=shares_of(split, active, len(limits.lower)), notes=(note,))

    return Policy(init, update, "federated", ("seconds", "link_seconds"), check_times)
