"""`federated`: local batches by speed and by the time that models are under way."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adaptive.extend import Decision, Observation
from controllers._policy import Policy
from controllers.predictors.base import Predictor, PredictorState, known, moving_average
from controllers.timing.allocate import allocate
from controllers.timing.batch_time import BatchTime
from controllers.timing.seconds import active_of, check_times, inputs_of, seconds_of, shares_of


class FederatedState(NamedTuple):
    """State of `federated`."""

    predictor: PredictorState
    speeds: np.ndarray  # shape=(n,), examples per second: the last prediction; NaN before the first


def federated(predictor: Predictor | None = None, *, dead_band: float = 0.05) -> Policy:
    """Let all clients of a federated round finish together: the slow and the badly connected take fewer examples.

    A client's round is `tau` local steps on minibatches of x_i examples, at v_i examples per second, and then the way
    of its model. For a given number of examples per round it is shortest where

        tau x_i / v_i + comm_i = T  for all i,    that is    x_i = (T - comm_i) v_i / tau  within bounds

    and T is such that the x_i sum up. A local batch is `tau x_i` examples here, so `tau` needs not be told: it is what
    sizes are multiples of (`ad.minibatches`). Solved exactly, in whole multiples, by `allocate`.

        def driver(state, batch):
            params, losses = jax.lax.scan(local_step, state, ad.minibatches(batch, tau))
            ctrl.hook(ctrl.federated(), comm.all_gather(mon.compute_seconds()), link_seconds)
            return comm.all_reduce(params), {"loss": comm.all_reduce(losses.mean())}

    The time that models travel is for you to say, because a round does not show it: all clients wait until the last
    model has arrived, so that `iteration_seconds - compute_seconds` is what a client waited for *others*, but for the
    last one. Taken for its own it would hold every split there is for the best one. Say what you know: bytes over the
    bandwidth of each client's link, or seconds of a transfer measured beforehand. What all have in common (an exchange
    among machines of one kind) does not matter to the split, and may be left out.

    Averaging weighs models by their examples, so a client that is given fewer has less influence, too; see
    docs/federated.md.

    Args:
      predictor: of speeds; by default `moving_average()` of the last rounds'.
      dead_band: no change unless the round is expected to shorten by more than this fraction. Of a driver with
        `ad.minibatches` every new size is compiled.

    Returns:
      A policy for a hook that is given each client's compute seconds, shape=(n,), and, if links differ, the seconds
      that each client's model is under way, shape=(n,). NaN where not known: then nothing changes.

    References:
      Chen et al. 2021, IEEE Transactions on Cloud Computing, doi 10.1109/TCC.2021.3102593: LB-BSP for federated
      learning, which tunes the local batch and leaves the number of local steps alone. How it comes by communication
      times is not known to us.
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
                "federated reads each client's compute seconds and the seconds that its model is under way; it was "
                f"given {1 + further.shape[1]} values."
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
