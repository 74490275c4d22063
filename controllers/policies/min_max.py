"""`balance`: give each worker what it can do in the time that the others take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adaptive.extend import Decision, Observation
from controllers._policy import Policy
from controllers.predictors.base import Predictor, PredictorState, known
from controllers.timing.allocate import allocate, level_of_lines, water_level
from controllers.timing.batch_time import BatchTime
from controllers.timing.seconds import active_of, inputs_of, seconds_of, shares_of
from controllers.timing.time_model import TimeModel

BAND = 3.0  # standard deviations
RECORD = 30.0  # steps over which a predictor is compared with the model
BETTER = 0.8  # a predictor speaks while its mean squared error is below this part of the model's


class Foreseen(NamedTuple):
    """What a predictor says of the workers' speeds, and how right it and the model have been. A pytree."""

    predictor: PredictorState
    speed: np.ndarray  # shape=(n,), of the level, 1 / seconds: the last prediction; NaN before the first
    errors: np.ndarray  # shape=(2, n), running mean squared errors: the predictor's, the model's


class MinMaxState(NamedTuple):
    """State of `min_max` with a predictor; without one it is the `TimeModel`."""

    model: TimeModel
    foreseen: Foreseen


def balance() -> Policy:
    """Keep the workers' steps equally long, by the sizes of their batches: `min_max` with its defaults.

        seconds = comm.all_gather(mon.compute_seconds())
        ctrl.hook(ctrl.balance(), seconds, every=10)

    Returns:
      A policy for a hook that is given each worker's compute seconds; shape=(n,).
    """
    return min_max()._replace(name="balance")


def min_max(
    *,
    window: int = 1,
    dead_band: float = 0.02,
    horizon: int = 100,
    switch_seconds: float = 0.0,
    growth: float = 2.0,
    quantum_loss: float = 0.02,
    predictor: Predictor | None = None,
    n_inputs: int = 0,
) -> Policy:
    """Split the global batch so that the slowest worker is done as early as can be.

    Learns of each worker how its step time goes with its batch size, `t_i(b) = max(floor_i, slope_i b + intercept_i)`,
    from the steps it sees, and solves for the integer split of least `max_i t_i(b_i)` exactly. Where times are
    proportional to the batch that is the split by speed; where a worker is slow whatever it gets, its batch is left
    alone. It follows a change of speed from the first step that shows it on, if the gain is more than noise can feign
    in so few steps; from the second one where changes have turned out to be pauses, or where a decision holds for
    several steps. Speeds that drift it follows by their trend. It splits whatever global batch other hooks ask for.

    Args:
      window: how many steps are between two decisions, at least.
      dead_band: the split changes when the slowest worker's step is expected to shorten by more than this fraction,
        and by more than noise, and not knowing how times go beyond the sizes seen, can feign.
      horizon: steps until sizes are likely to change for another reason …
      switch_seconds: … in which the gain must exceed what a change costs. By default nothing: programs make every size
        out of kernels that are compiled. (Tyagi & Sharma's 5 % dead-band pays for restarting TensorFlow.)
      growth: how many times the largest batch ever measured on a worker it may be given at once: further out, its
        time is a guess. The least that it may be given is the smallest lately measured over the square of this.
      quantum_loss: sizes are multiples of the program's quantum where that costs less than this fraction of the
        step; else of half of it, and so on.
      predictor: of speeds, such as `arx()` or `narx()`, where they change from step to step with what others take of
        the machine. It is told speeds at which the batch's size has been allowed for, and speaks for a worker while it
        has lately been more right than the model.
      n_inputs: how many values the predictor is given: what the hook has behind the seconds.

            cpu, memory = comm.all_gather(mon.cpu_available()), comm.all_gather(mon.memory_available())
            ctrl.hook(ctrl.min_max(predictor=ctrl.arx(), n_inputs=2), seconds, cpu, memory)

    Returns:
      A policy for a hook that is given each worker's compute seconds and `n_inputs` measurements, each of shape=(n,).
      NaN where not known.

    References:
      Chen et al. 2020, "Semi-Dynamic Load Balancing" (LB-BSP), for the problem and the model of time.
    """
    if dead_band < 0 or horizon < 1 or window < 1 or switch_seconds < 0 or growth <= 1 or quantum_loss < 0:
        raise ValueError(
            f"min_max: dead_band, switch_seconds and quantum_loss must not be negative, window and horizon at least 1 "
            f"and growth above 1; got {dead_band}, {switch_seconds}, {quantum_loss}, {window}, {horizon} and {growth}."
        )
    if n_inputs < 0 or (n_inputs and predictor is None):
        raise ValueError(
            f"min_max: n_inputs={n_inputs} is what a predictor is given: min_max(predictor=arx(), n_inputs=2)."
        )

    def init(n_workers: int) -> TimeModel | MinMaxState:
        model, nothing = TimeModel.init(n_workers), np.full(n_workers, np.nan)
        if predictor is None:
            return model
        return MinMaxState(
            model, Foreseen(predictor.init(n_workers, n_inputs), nothing, np.full((2, n_workers), np.nan))
        )

    def update(
        observation: Observation, state: TimeModel | MinMaxState
    ) -> tuple[Decision | None, TimeModel | MinMaxState]:
        if isinstance(state, TimeModel):
            inputs_of(observation, "min_max", 0)
            return review(observation, observe(observation, state), None)
        model = observe(observation, state.model)
        foreseen = foresee(observation, state, model)
        decision, model = review(observation, model, foreseen)
        return decision, MinMaxState(model, foreseen)

    def observe(observation: Observation, model: TimeModel) -> TimeModel:
        seconds = seconds_of(observation, "min_max")
        return model.observe(np.asarray(observation.previous_batch_sizes), seconds, observation.due)

    def foresee(observation: Observation, state: MinMaxState, model: TimeModel) -> Foreseen:
        """What the predictor says of speeds at which the batch's size, as the model sees it, has been allowed for."""
        assert predictor is not None
        seconds, inputs = seconds_of(observation, "min_max"), inputs_of(observation, "min_max", n_inputs)
        memory, said, errors = state.foreseen
        speed = model.shape.time / seconds
        new = np.stack([said / speed - 1, np.exp(-state.model.level.after(1)) / speed - 1]) ** 2
        moved = np.where(np.isnan(errors), new, errors + (np.minimum(new, 1.0) - errors) / RECORD)
        speeds, memory = predictor.update(memory, np.where(known(speed), speed, np.nan), inputs)
        return Foreseen(memory, speeds, np.where(np.isfinite(new), moved, errors))

    def review(
        observation: Observation, model: TimeModel, foreseen: Foreseen | None
    ) -> tuple[Decision | None, TimeModel]:
        if not observation.due or model.waiting < window:
            return None, model
        told = model
        if model.waiting > 1 or model.level.lasting < 0.5:  # a jump that one step of several shows may be a pause
            told = model._replace(level=model.level.without_latest_jumps())
        if foreseen is not None:
            speaks = (foreseen.errors[0] < BETTER * foreseen.errors[1]) & known(foreseen.speed)
            told = told._replace(level=told.level.told(-np.log(np.where(speaks, foreseen.speed, 1.0)), speaks))
        return decide(observation, told), model.decided()

    def decide(observation: Observation, model: TimeModel) -> Decision | None:
        total, limits = observation.global_batch, observation.limits
        active = active_of(observation)
        model = model.of(active)
        lower, upper, sizes = (np.asarray(a)[active] for a in (limits.lower, limits.upper, observation.batch_sizes))
        if len(lower) == 1 or not model.measured.all() or not lower.sum() <= total <= upper.sum():
            return None
        if not sizes.all():  # somebody has just been given examples
            return None
        stay = sizes * (total / sizes.sum())  # what the split would be if it stays as it is
        times = model.fit()
        seconds = times(stay)
        now, band = seconds.max(), max(dead_band, _noise_band(model, stay, seconds))
        if not worth_it(now, level_of_lines(total, times), band):
            return None
        trusted = np.minimum(
            upper, np.ceil(np.maximum(growth * model.largest, np.sqrt(growth) * stay)).astype(np.int64)
        )
        if trusted.sum() < total:
            trusted = upper
        # The other way the risk is smaller: what is wrong costs the others little time. But where time is flat there is
        # nothing to gain, and two sizes are too few to tell that from a slow worker under noise.
        least = np.maximum(lower, (np.minimum(model.shape.smallest, stay) / growth**2).astype(np.int64))
        ideal = water_level(total, times, least, trusted)  # at the least
        if not worth_it(now, ideal, band):
            return None
        split = _split(total, times, least, trusted, limits.quantum, stay, ideal * (1 + quantum_loss))
        then = times(split).max()
        if not worth_it(now, then, band):
            return None
        note = f"slowest worker expected at {_ms(then)} a step, down from {_ms(now)}"
        return Decision(shares=shares_of(split, active, len(limits.lower)), notes=(note,))

    def worth_it(now: float, then: float, band: float) -> bool:
        return now - then > band * now and (now - then) * horizon > switch_seconds

    return Policy(init, update, "min_max", ("seconds",))


def _split(
    total: int,
    times: BatchTime,
    lower: np.ndarray,
    upper: np.ndarray,
    quantum: int,
    stay: np.ndarray,
    late: float,
) -> np.ndarray:
    """The split into the largest quanta that keep all workers from being late; near to what it was."""
    while quantum > 1:
        split = allocate(total, times, lower, upper, quantum, near=stay)
        if times(split).max() <= late:
            return split
        quantum //= 2
    return allocate(total, times, lower, upper, near=stay)


def _noise_band(model: TimeModel, sizes: np.ndarray, seconds: np.ndarray) -> float:
    """How far the slowest of n equal workers may seem to lag behind, relatively: some standard deviations more than the
    largest of n is off by on average. While its speed drifts, or those of most do, to follow is worth more than not to
    be deceived."""
    n, slowest = len(seconds), np.argmax(seconds)
    unsettled = model.level.unsettled
    if unsettled[slowest] or 2 * unsettled.sum() >= n:
        return 0.0
    variance = model.variance(sizes)
    others = (variance.sum() - variance[slowest]) / (n - 1) ** 2
    return float(np.sqrt(variance[slowest] + others) * (BAND + np.sqrt(2 * np.log(n))))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
