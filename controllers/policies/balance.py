"""`balance`: the policy that splits the global batch so that all workers finish at the same time."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Limits, Observation
from controllers._policy import Policy
from controllers.predictors.base import Predictor, PredictorState, known
from controllers.timing._allocate import allocate, level_of_lines, water_level
from controllers.timing._batch_time import BatchTime
from controllers.timing._time_model import TimeModel
from controllers.timing.seconds import active_of, check_times, inputs_of, seconds_of, shares_of
from controllers.timing.stretch import Look, Stretch

from .probation import LEAST, Probation
from .promises import Promises
from .search import Search

BAND = 3.0  # standard deviations of noise that a gain must exceed
PREDICTOR_MEMORY = 30.0  # steps over which a predictor's error is averaged
PREDICTOR_BETTER = 0.8  # a predictor is used while its mean squared error is below this fraction of the model's
STRETCH = 0.025  # seconds: 50 times what one update of the model costs on a slow core
LOSS = 0.02  # of a split by multiples of a quantum, relative to the best split
MOST_UNMEASURED = 100  # steps without measurements, after which a split by earlier ones is given up
REST = 4  # stretches between two decisions, where a stretch is several steps and no split is on trial
_NO_INPUTS = np.zeros((0, 0))


class Forecast(NamedTuple):
    """A predictor's forecast of the workers' speeds, and its error beside the model's. A pytree."""

    predictor: PredictorState
    speed: np.ndarray  # shape=(n,), 1 / seconds, of the level: the latest forecast; NaN before the first
    errors: np.ndarray  # shape=(2, n), running mean squared errors: of the predictor, of the model


class BalanceState(NamedTuple):
    """State of `balance`. A pytree."""

    stretch: Stretch
    steps: np.ndarray  # shape=(), int64: steps in the latest stretch; 0 before the first
    model: TimeModel
    promises: Promises
    probation: Probation
    search: Search
    rests_until: np.ndarray  # shape=(), int64: number of the first step after which the policy decides again
    forecasts: tuple[Forecast, ...]  # one if there is a predictor, else none
    unmeasured: np.ndarray  # shape=(), int64: the latest steps in a row in which a worker's seconds were not known
    moved: np.ndarray  # shape=(), bool: whether the present split is one of this policy


class Move(NamedTuple):
    """A better split, as the model predicts it."""

    split: np.ndarray  # shape=(n,), int64; 0 for workers that take no examples
    factors: np.ndarray  # shape=(n,), predicted seconds of each worker over its seconds now
    now: float  # seconds of the slowest worker with the present split
    then: float  # predicted seconds of the slowest worker with the new split


def balance(
    *,
    window: int = 1,
    dead_band: float = 0.02,
    horizon: int = 100,
    switch_seconds: float = 0.0,
    growth: float = 2.0,
    stretch_seconds: float = STRETCH,
    predictor: Predictor | None = None,
    n_inputs: int = 0,
) -> Policy:
    """Split the global batch so that the slowest worker finishes as early as possible.

        seconds = comm.all_gather(mon.compute_seconds())
        ctrl.hook(ctrl.balance(), seconds, every=10)

    Fits each worker's step time against its batch size, `t_i(b) = max(floor_i, slope_i b + intercept_i)`, from the
    steps that it observes, and solves exactly for the integer split with the smallest `max_i t_i(b_i)`. Where times
    are proportional to the batch, that is the split by speed; a worker that is slow at any size keeps its batch.

    Reacts to a change of speed after the first step that shows it, if the gain exceeds what noise can produce in so
    few steps; after the second one if recent changes turned out to be pauses, or if a decision holds for several
    steps. Speeds that drift are extrapolated by their trend. Splits whatever global batch other hooks request.

    The expected time of a size includes the overhead of its microbatches (`Limits.call_overhead`). A split that makes
    the next steps longer than they would have been is reverted. After that, a new split must first be better in
    prediction, over steps measured after it was proposed; the number of these steps grows with each reverted split.

    Goes back to equal shares after 100 steps in a row without measurements of all workers, such as beside a compiler
    that slows the steps down.

    Sizes are multiples of the largest power of two that makes the step at most 2 % longer than the best split. If
    microbatches have no overhead, the candidates are the program's quantum, half of it, and so on.

    Args:
      window: the least number of steps between two decisions.
      dead_band: the least predicted gain, as a fraction of the slowest worker's step. The gain must also exceed the
        noise, and the uncertainty of predicted times at sizes that were never measured.
      horizon: steps over which a gain counts, that is, until sizes are likely to change for another reason.
      switch_seconds: cost of a change; the gain over `horizon` steps must exceed it. 0 by default, because programs
        make every size from compiled kernels. (Tyagi & Sharma's dead-band of 5 % pays for restarting TensorFlow.)
      growth: a worker's batch grows at most to this multiple of its largest measured batch, because times beyond are
        extrapolated. It shrinks at most to its smallest recently measured batch divided by the square of this.
      stretch_seconds: steps at the same sizes are averaged over stretches of this many seconds; 0 makes every step a
        stretch. The policy decides at a due step after a stretch: after each while a split is on trial, otherwise
        after every fourth. If a stretch has several steps, a split is kept only if the measured steps are shorter with
        it, and each reverted split makes the policy wait longer before the next one.
      predictor: predicts speeds that change from step to step with other load on the machine, such as `arx()` or
        `narx()`. It receives speeds corrected for the batch size. Its prediction is used for a worker while its recent
        error is smaller than the model's.
      n_inputs: number of values given to the predictor: those after the seconds in the hook.

            cpu, memory = comm.all_gather(mon.cpu_available()), comm.all_gather(mon.memory_available())
            ctrl.hook(ctrl.balance(stretch_seconds=0, predictor=ctrl.published.arx(), n_inputs=2), seconds, cpu, memory)

    Returns:
      A policy for a hook with each worker's compute seconds and `n_inputs` measurements; each shape=(n,), NaN where
      unknown. Replicated.

    Raises:
      ValueError: an argument is out of range, or `n_inputs` is given without a predictor.

    References:
      Chen et al. 2020, "Semi-Dynamic Load Balancing" (LB-BSP), for the problem and the model of time.
    """
    negative = min(dead_band, switch_seconds, stretch_seconds) < 0
    if negative or horizon < 1 or window < 1 or growth <= 1:
        raise ValueError(
            "balance: dead_band, switch_seconds and stretch_seconds must not be negative, window and horizon at least "
            f"1 and growth above 1; got {dead_band}, {switch_seconds}, {stretch_seconds}, {window}, {horizon} and "
            f"{growth}."
        )
    if n_inputs < 0 or (n_inputs and predictor is None):
        raise ValueError(f"balance: n_inputs={n_inputs} needs a predictor, as in balance(predictor=arx(), n_inputs=2).")

    def init(n_workers: int) -> BalanceState:
        model, unknown = TimeModel.init(n_workers), np.full(n_workers, np.nan)
        forecasts: tuple[Forecast, ...] = ()
        if predictor is not None:
            forecasts = (Forecast(predictor.init(n_workers, n_inputs), unknown, np.full((2, n_workers), np.nan)),)
        return BalanceState(
            stretch=Stretch.init(n_workers),
            steps=np.asarray(0),
            model=model,
            promises=Promises.init(n_workers),
            probation=Probation.init(n_workers),
            search=Search.init(n_workers),
            rests_until=np.asarray(0),
            forecasts=forecasts,
            unmeasured=np.asarray(0),
            moved=np.asarray(False),
        )

    def update(observation: Observation, state: BalanceState) -> tuple[Decision | None, BalanceState]:
        values, ran = observation.values, observation.previous_batch_sizes
        if observation.due or predictor or len(values) != 1 or getattr(values[0], "shape", None) != (len(ran),):
            seconds, inputs = seconds_of(observation, "balance"), inputs_of(observation, "balance", n_inputs)
        else:  # most steps: `seconds_of` would accept these values, and costs more
            seconds, inputs = np.asarray(values[0], np.float64), _NO_INPUTS
        missing = not np.isfinite(seconds[np.asarray(ran) > 0]).all()
        state = state._replace(unmeasured=np.asarray(state.unmeasured + 1 if missing else 0))
        if observation.due and state.moved and state.unmeasured >= MOST_UNMEASURED:
            return back_to_equal(observation, state)
        stretch, looks = state.stretch.add(ran, seconds, stretch_seconds)
        state, due = state._replace(stretch=stretch), observation.due and observation.step >= int(state.rests_until)
        for number, latest in enumerate(looks, 1):
            state = learn(latest, inputs, due and number == len(looks), state)
        if not due or state.model.waiting < window:
            return None, state
        decision, state = judge(observation, state)
        if decision is None:
            decision, state = propose(observation, with_forecasts(state), state)
        if decision is not None:
            state = state._replace(moved=np.asarray(True))
        return decision, state._replace(model=state.model.decided(), rests_until=rest(observation.step, state))

    def back_to_equal(observation: Observation, state: BalanceState) -> tuple[Decision, BalanceState]:
        """Give up a split whose measurements are old: the load on which it was based may be over."""
        fresh = init(len(observation.batch_sizes))._replace(unmeasured=state.unmeasured)
        active = active_of(observation)
        note = f"back to equal shares: {int(state.unmeasured)} steps in a row were not measured on all workers"
        return decision_for(np.ones(len(active)), active, note), fresh

    def rest(step: int, state: BalanceState) -> np.ndarray:
        """Return the number of the first step after which another decision is worth its cost."""
        if state.steps <= 1:
            return np.asarray(0)
        trying = state.probation.phase or state.promises.back.open or state.promises.ahead.open
        missing = LEAST - int(state.probation.here.looks)  # stretches before the first split is allowed
        stretches = 1 if trying else missing if missing > 0 else REST
        return np.asarray(step + stretches * int(state.steps))

    def learn(latest: Look, inputs: np.ndarray, due: bool, state: BalanceState) -> BalanceState:
        """Update the model with a stretch; `due`: whether a decision may follow."""
        sizes, seconds, before = latest.sizes, latest.seconds, int(state.steps)
        model = state.model
        if before and latest.steps != before:
            model = model.with_longer_means(latest.steps / before)
        model = model.observe(sizes, seconds, due)
        forecasts = tuple(forecast(seconds, inputs, state.model, model, before) for before in state.forecasts)
        # A forecast of the next step cannot be judged by later ones.
        promises = state.promises if forecasts else state.promises.see(sizes, seconds)
        probation = state.probation.see(sizes, latest.slowest, latest.steps)
        return state._replace(
            steps=np.asarray(latest.steps), model=model, promises=promises, probation=probation, forecasts=forecasts
        )

    def forecast(
        seconds: np.ndarray, inputs: np.ndarray, was: TimeModel, model: TimeModel, latest: Forecast
    ) -> Forecast:
        """Update a predictor with the measured speeds, corrected for batch sizes by the model."""
        assert predictor is not None
        memory, predicted, errors = latest
        speed = model.shape.time / seconds
        new = np.stack([predicted / speed - 1, np.exp(-was.level.after(1)) / speed - 1]) ** 2
        moved = np.where(np.isnan(errors), new, errors + (np.minimum(new, 1.0) - errors) / PREDICTOR_MEMORY)
        speeds, memory = predictor.update(memory, np.where(known(speed), speed, np.nan), inputs)
        return Forecast(memory, speeds, np.where(np.isfinite(new), moved, errors))

    def with_forecasts(state: BalanceState) -> TimeModel:
        """Return the model, with a predictor's forecasts of levels where they have been more accurate."""
        model = state.model
        if model.waiting > 1 or model.level.lasting < 0.5:  # a jump that one step of several shows may be a pause
            model = model._replace(level=model.level.without_latest_jumps())
        for latest in state.forecasts:
            better = (latest.errors[0] < PREDICTOR_BETTER * latest.errors[1]) & known(latest.speed)
            model = model._replace(level=model.level.with_levels(-np.log(np.where(better, latest.speed, 1.0)), better))
        return model

    def judge(observation: Observation, state: BalanceState) -> tuple[Decision | None, BalanceState]:
        """Decide to return to the previous split if the steps with the present one were longer."""
        sizes, active = np.asarray(observation.batch_sizes), active_of(observation)
        promises = state.promises.without_others(sizes, active, observation.global_batch)
        probation = state.probation.without_others(sizes, observation.global_batch)
        better, probation = probation.verdict(sizes)
        if better is not None and np.array_equal(np.flatnonzero(better), active):
            kept = state._replace(promises=promises.dropped(), probation=probation)
            return decision_for(better, active, "changing back: steps were measured to be no shorter than before"), kept
        if promises.broken:
            note = f"changing back: steps took {promises.back.gain:.1%} longer than they would have"
            kept = state._replace(promises=promises.judged(), probation=probation)
            return decision_for(promises.back.other, active, note), kept
        return None, state._replace(promises=promises.judged(), probation=probation)

    def propose(
        observation: Observation, model: TimeModel, state: BalanceState
    ) -> tuple[Decision | None, BalanceState]:
        """Decide on a better split if predictions of earlier ones came true, or this one has passed its trial."""
        sizes, active = np.asarray(observation.batch_sizes), active_of(observation)
        promises, probation = state.promises, state.probation
        move, search = decide(observation, model, state.search)
        state = state._replace(search=search)
        if move is None:
            return None, state
        gain, others_ask = 1 - move.then / move.now, observation.global_batch != sizes.sum()
        if not others_ask and not probation.allows(sizes, gain, int(state.steps)):
            return None, state
        split, factors = move.split, move.factors
        note = f"slowest worker expected at {_ms(move.then)} a step, down from {_ms(move.now)}"
        if promises.patience > 0 and not others_ask:
            tried = promises.ahead
            if not promises.tried_enough(dead_band):
                again = not tried.open or tried.steps >= promises.patience
                return None, state._replace(promises=promises.proposed(sizes, split, factors)) if again else state
            split, factors = tried.other, tried.factors
            note = f"slowest worker would have finished {tried.gain:.1%} sooner in {int(tried.steps)} steps"
        promises, probation = promises.taken(sizes, split, factors), probation.moved(sizes, gain)
        return decision_for(split, active, note), state._replace(promises=promises, probation=probation)

    def decision_for(split: np.ndarray, active: np.ndarray, note: str) -> Decision:
        return Decision(shares=shares_of(split[active], active, len(split)), notes=(note,))

    def decide(observation: Observation, model: TimeModel, search: Search) -> tuple[Move | None, Search]:
        """Search for a better split, unless recent searches found none."""
        found = prospect(observation, model)
        if isinstance(found, str) or not worth_it(found.now, found.ideal, found.band):
            return None, search
        total, now, ideal, band, times = observation.global_batch, found.now, found.ideal, found.band, found.times
        limits, active = observation.limits, active_of(observation)
        all_sizes, gain = np.asarray(observation.batch_sizes), 1 - ideal / now
        if search.skips(all_sizes, gain):
            return None, search.skipped()
        rate = found.seconds / found.stay
        split, then = _split(total, times, found.least, found.most, limits, found.stay, rate, ideal)
        if not worth_it(now, then.max(), band):
            return None, search.in_vain(all_sizes, gain)
        n = len(limits.lower)
        sizes_then, factors = np.zeros(n, np.int64), np.ones(n)
        sizes_then[active], factors[active] = split, then / found.seconds
        return Move(sizes_then, factors, float(now), float(then.max())), search

    def prospect(observation: Observation, model: TimeModel) -> _Prospect | str:
        """Return how long steps take with the present split, and at least with any; or why that is not known."""
        total, limits = observation.global_batch, observation.limits
        active = active_of(observation)
        model = model.of(active)
        lower, upper = limits.arrays.lower[active], limits.arrays.upper[active]
        sizes = np.asarray(observation.batch_sizes)[active]
        if len(lower) == 1:
            return "only one worker takes examples"
        if not model.measured.all():
            return f"no seconds of workers {listed(active[~model.measured])} are known yet"
        if not lower.sum() <= total <= upper.sum():
            return f"the global batch of {total} is outside the workers' limits"
        if not sizes.all():
            return f"workers {listed(active[sizes == 0])} have joined, and were not measured yet"
        stay = sizes * (total / sizes.sum())  # the present split, scaled to the requested batch
        times = model.fit()
        seconds = times(stay)
        now, band = float(seconds.max()), max(dead_band, _noise_band(model, stay, seconds))
        trusted = np.minimum(
            upper, np.ceil(np.maximum(growth * model.largest, np.sqrt(growth) * stay)).astype(np.int64)
        )
        if trusted.sum() < total:
            trusted = upper
        # Shrinking risks less: a wrong guess costs the other workers little. But if time does not depend on the batch,
        # nothing is gained, and with noise two sizes do not distinguish a constant time from a slow worker.
        least = np.maximum(lower, (np.minimum(model.shape.smallest, stay) / growth**2).astype(np.int64))
        ideal = level_of_lines(total, times)
        if worth_it(now, ideal, band):
            ideal = water_level(total, times, least, trusted)
        return _Prospect(times, stay, seconds, least, trusted, now, float(ideal), band)

    def why(observation: Observation, state: BalanceState) -> str:
        """Return why no other split is asked for."""
        found = prospect(observation, with_forecasts(state))
        if isinstance(found, str):
            return found
        gain = max(0.0, 1 - found.ideal / found.now)
        said = f"no split can take more than {gain:.1%} off the slowest worker's {_ms(found.now)} a step"
        if not worth_it(found.now, found.ideal, found.band):
            return f"{said}, and a change needs {found.band:.1%}"
        return f"{said}; one that is worth a change is on trial, was not found, or did not help when it was tried"

    def listed(workers: np.ndarray) -> str:
        return ", ".join(map(str, workers.tolist()))

    def worth_it(now: float, then: float, band: float) -> bool:
        return now - then > band * now and (now - then) * horizon > switch_seconds

    def rests_until(state: BalanceState) -> int:
        return int(state.rests_until)

    check = partial(check_times, n_inputs=n_inputs)
    return Policy(init, update, "balance", ("seconds",), check, rests_until, why)


class _Prospect(NamedTuple):
    """The present split of active workers, and the best that another one can reach.

    Attributes:
      times: the workers' step times.
      stay: the present split, scaled to the requested batch.
      seconds: of each worker with it.
      least, most: bounds of the sizes for which times are trusted.
      now: seconds of the slowest worker.
      ideal: a lower bound of them with any split.
      band: the least relative gain that is worth a change.
    """

    times: BatchTime
    stay: np.ndarray
    seconds: np.ndarray
    least: np.ndarray
    most: np.ndarray
    now: float
    ideal: float
    band: float


def _split(
    total: int,
    times: BatchTime,
    lower: np.ndarray,
    upper: np.ndarray,
    limits: Limits,
    stay: np.ndarray,
    rate: np.ndarray,
    ideal: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the split with the least time, and the workers' seconds, including the overhead of microbatches.

    Multiples of a large quantum need few microbatches, but are far from the best split; multiples of a small one need
    many. Of the quanta that lose less than `LOSS`, relatively, the largest is taken: it has few different sizes, so
    these recur and get kernels of their own. Ties are broken towards the present split.

    Args:
      total: the global batch.
      times: the workers' step times.
      lower, upper: bounds of the sizes; shape=(n,).
      limits: the program's limits.
      stay: the present split, scaled to `total`; shape=(n,).
      rate: seconds per example, to convert the overhead of a microbatch to seconds; shape=(n,).
      ideal: lower bound of the seconds of any split; a split near it needs no comparison.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    unit = limits.multiple
    largest = unit << max(0, (total // unit // len(stay)).bit_length() - 1)
    quantum = largest if limits.call_overhead else max(limits.quantum, unit)
    while quantum >= unit:
        split = allocate(total, times, lower, upper, quantum, near=stay)
        calls = np.bitwise_count(np.maximum(split // unit, 1)).astype(int)
        more = np.where(split == stay, 0, calls - 1)  # measured seconds of the present sizes include theirs
        found.append((split, times(split) + limits.call_overhead * rate * more))
        if found[-1][1].max() <= ideal * (1 + LOSS):
            break
        quantum //= 2
    best = min(seconds.max() for _, seconds in found)
    return next((split, seconds) for split, seconds in found if seconds.max() <= best * (1 + LOSS))


def _noise_band(model: TimeModel, sizes: np.ndarray, seconds: np.ndarray) -> float:
    """Return the relative lag of the slowest of n equal workers that noise alone can explain.

    That is `BAND` standard deviations more than the expected maximum of n. It is smaller if the fastest worker is late,
    because the others could take over little; and 0 while the slowest worker's speed drifts, or most workers' do,
    because following is then worth more than avoiding a false alarm.
    """
    n, slowest = len(seconds), np.argmax(seconds)
    unsettled = model.level.unsettled
    if unsettled[slowest] or 2 * unsettled.sum() >= n:
        return 0.0
    variance = model.variance(sizes)
    others = (variance.sum() - variance[slowest]) / (n - 1) ** 2
    speeds = sizes / seconds
    part = 1 - speeds[slowest] / speeds.sum()
    return float(part * np.sqrt(variance[slowest] + others) * (BAND + np.sqrt(2 * np.log(n))))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
