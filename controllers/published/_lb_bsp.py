"""`lb_bsp`: batches in proportion to predicted speeds."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Observation
from adaptive.base.split import split
from controllers._policy import Policy
from controllers.predictors.arx import arx
from controllers.predictors.base import Predictor, PredictorState, best_of, known, memoryless, moving_average
from controllers.timing.seconds import active_of, check_times, inputs_of, seconds_of, shares_of


class LbBspState(NamedTuple):
    """State of `lb_bsp`."""

    predictor: PredictorState
    speeds: np.ndarray  # shape=(n,), examples per second: the last prediction; NaN before the first


def lb_bsp(predictor: Predictor | None = None, *, n_inputs: int = 0, dead_band: float = 0.02) -> Policy:
    """Return a policy that splits the global batch by predicted speeds, for processors that other jobs share.

        x_i = X v_i / sum_j v_j

    Speeds are predicted from past speeds and from the machine's free resources.

        seconds = comm.all_gather(mon.compute_seconds())
        cpu, memory = comm.all_gather(mon.cpu_available()), comm.all_gather(mon.memory_available())
        ctrl.hook(ctrl.published.lb_bsp(n_inputs=2), seconds, cpu, memory)

    Args:
      predictor: predictor of speeds. By default, for each worker, the one of `arx()`, a moving average and the last
        speed with the least recent error. The paper's is `narx()`, which costs some four times as much.
      n_inputs: number of the hook's values after the seconds.
      dead_band: no change unless the longest step is expected to shorten by more than this fraction. Published: 0.

    Returns:
      A policy for a hook with each worker's compute seconds and `n_inputs` measurements, each of shape=(n,). NaN where
      unknown.

    Raises:
      ValueError: an argument is negative.

    References:
      Chen et al. 2020, "Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments"
      (LB-BSP), section 3.2.
    """
    if n_inputs < 0 or dead_band < 0:
        raise ValueError(f"lb_bsp: n_inputs and dead_band must not be negative; got {n_inputs} and {dead_band}.")
    rule = predictor if predictor is not None else best_of(arx(), moving_average(), memoryless())

    def init(n_workers: int) -> LbBspState:
        return LbBspState(rule.init(n_workers, n_inputs), np.full(n_workers, np.nan))

    def update(observation: Observation, state: LbBspState) -> tuple[Decision | None, LbBspState]:
        seconds, inputs = seconds_of(observation), inputs_of(observation)
        with np.errstate(divide="ignore", invalid="ignore"):
            speed = np.asarray(observation.previous_batch_sizes) / seconds
        speeds, memory = rule.update(state.predictor, np.where(known(speed), speed, np.nan), inputs)
        state = LbBspState(memory, speeds)
        return decide(observation, speeds) if observation.due else None, state

    def decide(observation: Observation, predicted: np.ndarray) -> Decision | None:
        total, active = observation.global_batch, active_of(observation)
        stay, speeds = np.asarray(observation.batch_sizes, np.float64)[active], predicted[active]
        if not (stay.all() and known(speeds).all()):  # or a worker has just become active
            return None
        sizes = split(total, shares_of(speeds, active, len(predicted)), observation.limits)
        now, then = (stay * (total / stay.sum()) / speeds).max(), (np.asarray(sizes)[active] / speeds).max()
        return Decision(shares=tuple(map(float, sizes))) if now - then > dead_band * now else None

    reads = ("seconds", "cpu_available", "memory_available")[: 1 + n_inputs]
    return Policy(init, update, "lb_bsp", reads, partial(check_times, n_inputs=n_inputs))
