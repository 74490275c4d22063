"""`balance`: give each worker what it can do in the time that the others take."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from adaptive.extend import Decision, Limits, Observation
from controllers._policy import Policy
from controllers.predictors.base import Predictor, PredictorState, known
from controllers.timing.allocate import allocate, level_of_lines, water_level
from controllers.timing.batch_time import BatchTime
from controllers.timing.seconds import active_of, check_times, inputs_of, seconds_of, shares_of
from controllers.timing.stretch import Look, Stretch
from controllers.timing.time_model import TimeModel

from .probation import Probation
from .promises import Promises
from .search import Search

BAND = 3.0  # standard deviations
RECORD = 30.0  # steps over which a predictor is compared with the model
STRETCH = 0.025  # seconds: 50 times what a look at a step costs on a slow core
REST = 4  # looks between two decisions, where a look takes several steps and no split is being tried
_NO_INPUTS = np.zeros((0, 0))
BETTER = 0.8  # a predictor speaks while its mean squared error is below this part of the model's


class Foreseen(NamedTuple):
    """What a predictor says of the workers' speeds, and how right it and the model have been. A pytree."""

    predictor: PredictorState
    speed: np.ndarray  # shape=(n,), of the level, 1 / seconds: the last prediction; NaN before the first
    errors: np.ndarray  # shape=(2, n), running mean squared errors: the predictor's, the model's


class MinMaxState(NamedTuple):
    """State of `balance`. A pytree."""

    stretch: Stretch
    steps: np.ndarray  # shape=(), int64: of the latest look; 0 before the first
    model: TimeModel
    promises: Promises
    probation: Probation
    search: Search
    rests_until: np.ndarray  # shape=(), int64: the number of the first step after which a decision is possible again
    foreseen: tuple[Foreseen, ...]  # one where there is a predictor


class Move(NamedTuple):
    """A split that promises to be better."""

    split: np.ndarray  # shape=(n,), int64; 0 for workers that take no examples
    factors: np.ndarray  # shape=(n,), of the workers' times
    now: float  # seconds of the slowest worker
    then: float


def balance(
    *,
    window: int = 1,
    dead_band: float = 0.02,
    horizon: int = 100,
    switch_seconds: float = 0.0,
    growth: float = 2.0,
    quantum_loss: float = 0.02,
    stretch_seconds: float = STRETCH,
    predictor: Predictor | None = None,
    n_inputs: int = 0,
) -> Policy:
    """Split the global batch so that the slowest worker finishes as early as possible.

        seconds = comm.all_gather(mon.compute_seconds())
        ctrl.hook(ctrl.balance(), seconds, every=10)

    Fits each worker's step time against its batch size, `t_i(b) = max(floor_i, slope_i b + intercept_i)`, from the
    steps that it observes, and solves exactly for the integer split of least `max_i t_i(b_i)`. Where times are
    proportional to the batch that is the split by speed; where a worker is slow whatever it gets, its batch is left
    alone. It follows a change of speed from the first step that shows it on, if the gain is more than noise can feign
    in so few steps; from the second one where changes have turned out to be pauses, or where a decision holds for
    several steps. Speeds that drift it follows by their trend. It splits whatever global batch other hooks ask for.

    A size is priced with the kernel calls that it takes, by what one more call costs (`Limits.call`). A split that
    makes the next steps longer than they would have been is given up for the one before; further ones then have to be
    better in steps behind the one in which they were thought of, for the longer the oftener that has happened.

    Args:
      window: how many steps are between two decisions, at least.
      dead_band: the split changes when the slowest worker's step is expected to shorten by more than this fraction,
        and by more than noise, and not knowing how times go beyond the sizes seen, can feign.
      horizon: steps until sizes are likely to change for another reason …
      switch_seconds: … in which the gain must exceed what a change costs. By default nothing: programs make every size
        out of kernels that are compiled. (Tyagi & Sharma's 5 % dead-band pays for restarting TensorFlow.)
      growth: how many times the largest batch ever measured on a worker it may be given at once: further out, its
        time is a guess. The least that it may be given is the smallest lately measured over the square of this.
      quantum_loss: sizes are multiples of the largest power of two that costs less than this fraction of the step
        beside the best; where calls cost nothing, of the program's quantum, else of half of it, and so on.
      stretch_seconds: consecutive steps at the same sizes are added up until they have taken this long, and the policy
        looks at their mean. It decides at a due step after a look: after each one while a split is on trial, else after
        every fourth. Where a look takes several steps, a split is kept only if steps are measured to be shorter with it
        than before, and each split that does not pay makes the policy wait for longer before the next one. 0: it looks
        at every step.
      predictor: of speeds, such as `arx()` or `narx()`, where they change from step to step with what others take of
        the machine. It is told speeds at which the batch's size has been allowed for, and speaks for a worker while it
        has lately been more right than the model.
      n_inputs: how many values the predictor is given: what the hook has behind the seconds.

            cpu, memory = comm.all_gather(mon.cpu_available()), comm.all_gather(mon.memory_available())
            ctrl.hook(ctrl.balance(stretch_seconds=0, predictor=ctrl.arx(), n_inputs=2), seconds, cpu, memory)

    Returns:
      A policy for a hook that is given each worker's compute seconds and `n_inputs` measurements, each of shape=(n,).
      NaN where not known.

    References:
      Chen et al. 2020, "Semi-Dynamic Load Balancing" (LB-BSP), for the problem and the model of time.
    """
    negative = min(dead_band, switch_seconds, quantum_loss, stretch_seconds) < 0
    if negative or horizon < 1 or window < 1 or growth <= 1:
        raise ValueError(
            "balance: dead_band, switch_seconds, quantum_loss and stretch_seconds must not be negative, window and "
            f"horizon at least 1 and growth above 1; got {dead_band}, {switch_seconds}, {quantum_loss}, "
            f"{stretch_seconds}, {window}, {horizon} and {growth}."
        )
    if n_inputs < 0 or (n_inputs and predictor is None):
        raise ValueError(
            f"balance: n_inputs={n_inputs} is what a predictor is given: balance(predictor=arx(), n_inputs=2)."
        )

    def init(n_workers: int) -> MinMaxState:
        model, nothing = TimeModel.init(n_workers), np.full(n_workers, np.nan)
        foreseen: tuple[Foreseen, ...] = ()
        if predictor is not None:
            foreseen = (Foreseen(predictor.init(n_workers, n_inputs), nothing, np.full((2, n_workers), np.nan)),)
        return MinMaxState(
            stretch=Stretch.init(n_workers),
            steps=np.asarray(0),
            model=model,
            promises=Promises.init(n_workers),
            probation=Probation.init(n_workers),
            search=Search.init(n_workers),
            rests_until=np.asarray(0),
            foreseen=foreseen,
        )

    def update(observation: Observation, state: MinMaxState) -> tuple[Decision | None, MinMaxState]:
        values, ran = observation.values, observation.previous_batch_sizes
        if observation.due or predictor or len(values) != 1 or getattr(values[0], "shape", None) != (len(ran),):
            seconds, inputs = seconds_of(observation, "balance"), inputs_of(observation, "balance", n_inputs)
        else:  # in nearly every step: nothing that `seconds_of` would refuse
            seconds, inputs = np.asarray(values[0], np.float64), _NO_INPUTS
        stretch, looks = state.stretch.add(ran, seconds, stretch_seconds)
        state, due = state._replace(stretch=stretch), observation.due and observation.step >= int(state.rests_until)
        for number, latest in enumerate(looks, 1):
            state = look(latest, inputs, due and number == len(looks), state)
        if not due or state.model.waiting < window:
            return None, state
        decision, state = judge(observation, state)
        if decision is None:
            decision, state = propose(observation, told(state), state)
        return decision, state._replace(model=state.model.decided(), rests_until=rest(observation.step, state))

    def rest(step: int, state: MinMaxState) -> np.ndarray:
        """Return the number of the step at which the next decision is worth its price."""
        if state.steps <= 1:
            return np.asarray(0)
        trying = state.probation.phase or state.promises.back.open or state.promises.ahead.open
        return np.asarray(step + (1 if trying else REST) * int(state.steps))

    def look(latest: Look, inputs: np.ndarray, due: bool, state: MinMaxState) -> MinMaxState:
        """Learn from a step, or a stretch of short ones; `due`: whether a decision may follow."""
        sizes, seconds, before = latest.sizes, latest.seconds, int(state.steps)
        model = state.model
        if before and latest.steps != before:
            model = model.with_longer_means(latest.steps / before)
        model = model.observe(sizes, seconds, due)
        foreseen = tuple(foresee(seconds, inputs, state.model, model, before) for before in state.foreseen)
        # What a predictor says of the next step no later one can judge.
        promises = state.promises if foreseen else state.promises.see(sizes, seconds)
        probation = state.probation.see(sizes, latest.slowest, latest.steps)
        return state._replace(
            steps=np.asarray(latest.steps), model=model, promises=promises, probation=probation, foreseen=foreseen
        )

    def foresee(
        seconds: np.ndarray, inputs: np.ndarray, was: TimeModel, model: TimeModel, foreseen: Foreseen
    ) -> Foreseen:
        """What the predictor says of speeds at which the batch's size, as the model sees it, has been allowed for."""
        assert predictor is not None
        memory, said, errors = foreseen
        speed = model.shape.time / seconds
        new = np.stack([said / speed - 1, np.exp(-was.level.after(1)) / speed - 1]) ** 2
        moved = np.where(np.isnan(errors), new, errors + (np.minimum(new, 1.0) - errors) / RECORD)
        speeds, memory = predictor.update(memory, np.where(known(speed), speed, np.nan), inputs)
        return Foreseen(memory, speeds, np.where(np.isfinite(new), moved, errors))

    def told(state: MinMaxState) -> TimeModel:
        """The model, with what the predictor says of levels, where it is to be believed."""
        model = state.model
        if model.waiting > 1 or model.level.lasting < 0.5:  # a jump that one step of several shows may be a pause
            model = model._replace(level=model.level.without_latest_jumps())
        for foreseen in state.foreseen:
            speaks = (foreseen.errors[0] < BETTER * foreseen.errors[1]) & known(foreseen.speed)
            model = model._replace(level=model.level.told(-np.log(np.where(speaks, foreseen.speed, 1.0)), speaks))
        return model

    def judge(observation: Observation, state: MinMaxState) -> tuple[Decision | None, MinMaxState]:
        """Return to the split before, if the steps with the present one were longer."""
        sizes, active = np.asarray(observation.batch_sizes), active_of(observation)
        promises = state.promises.without_others(sizes, active, observation.global_batch)
        probation = state.probation.without_others(sizes, observation.global_batch)
        better, probation = probation.verdict(sizes)
        if better is not None and np.array_equal(np.flatnonzero(better), active):
            kept = state._replace(promises=promises.dropped(), probation=probation)
            return asked(better, active, "changing back: steps were measured to be no shorter than before"), kept
        if promises.broken:
            note = f"going back: steps took {promises.back.gain:.1%} longer than they would have"
            kept = state._replace(promises=promises.judged(), probation=probation)
            return asked(promises.back.other, active, note), kept
        return None, state._replace(promises=promises.judged(), probation=probation)

    def propose(observation: Observation, model: TimeModel, state: MinMaxState) -> tuple[Decision | None, MinMaxState]:
        """Change to a better split, if earlier ones kept their promises, or this one has been tried on paper."""
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
            note = f"slowest worker would have been done {tried.gain:.1%} sooner in {int(tried.steps)} steps"
        promises, probation = promises.taken(sizes, split, factors), probation.moved(sizes, gain)
        return asked(split, active, note), state._replace(promises=promises, probation=probation)

    def asked(split: np.ndarray, active: np.ndarray, note: str) -> Decision:
        return Decision(shares=shares_of(split[active], active, len(split)), notes=(note,))

    def decide(observation: Observation, model: TimeModel, search: Search) -> tuple[Move | None, Search]:
        """Search for a better split, unless that was in vain lately."""
        total, limits = observation.global_batch, observation.limits
        active = active_of(observation)
        model = model.of(active)
        lower, upper, sizes = (np.asarray(a)[active] for a in (limits.lower, limits.upper, observation.batch_sizes))
        if len(lower) == 1 or not model.measured.all() or not lower.sum() <= total <= upper.sum():
            return None, search
        if not sizes.all():  # somebody has just been given examples
            return None, search
        stay = sizes * (total / sizes.sum())  # what the split would be if it stays as it is
        times = model.fit()
        seconds = times(stay)
        now, band = seconds.max(), max(dead_band, _noise_band(model, stay, seconds))
        if not worth_it(now, level_of_lines(total, times), band):
            return None, search
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
            return None, search
        all_sizes, gain = np.asarray(observation.batch_sizes), 1 - ideal / now
        if search.skips(all_sizes, gain):
            return None, search.skipped()
        split, then = _split(total, times, least, trusted, limits, stay, seconds / stay, quantum_loss, ideal)
        if not worth_it(now, then.max(), band):
            return None, search.in_vain(all_sizes, gain)
        n = len(limits.lower)
        sizes_then, factors = np.zeros(n, np.int64), np.ones(n)
        sizes_then[active], factors[active] = split, then / seconds
        return Move(sizes_then, factors, float(now), float(then.max())), search

    def worth_it(now: float, then: float, band: float) -> bool:
        return now - then > band * now and (now - then) * horizon > switch_seconds

    def rests_until(state: MinMaxState) -> int:
        return int(state.rests_until)

    check = partial(check_times, n_inputs=n_inputs)
    return Policy(init, update, "balance", ("seconds",), check, rests_until)


def _split(
    total: int,
    times: BatchTime,
    lower: np.ndarray,
    upper: np.ndarray,
    limits: Limits,
    stay: np.ndarray,
    rate: np.ndarray,
    loss: float,
    ideal: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The split of least time, where every call beyond a batch's first costs; and the workers' times.

    Multiples of a large quantum are few calls, and far from the best split; of a small one, the other way round. Of
    those that lose less than `loss`, relatively, the largest is taken: there are fewer such sizes, so that they come
    again and have kernels of their own. Near to what it was.

    Args:
      rate: seconds per example, by which calls are priced; shape=(n,).
      ideal: seconds that no split is done before, so that a split near it needs no comparison.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    unit = limits.multiple
    largest = unit << max(0, (total // unit // len(stay)).bit_length() - 1)
    quantum = largest if limits.call else max(limits.quantum, unit)
    while quantum >= unit:
        split = allocate(total, times, lower, upper, quantum, near=stay)
        calls = np.bitwise_count(np.maximum(split // unit, 1)).astype(int)
        more = np.where(split == stay, 0, calls - 1)  # what the present sizes take is in their measured seconds
        found.append((split, times(split) + limits.call * rate * more))
        if found[-1][1].max() <= ideal * (1 + loss):
            break
        quantum //= 2
    best = min(seconds.max() for _, seconds in found)
    return next((split, seconds) for split, seconds in found if seconds.max() <= best * (1 + loss))


def _noise_band(model: TimeModel, sizes: np.ndarray, seconds: np.ndarray) -> float:
    """How far the slowest of n equal workers may seem to lag behind, relatively: some standard deviations more than the
    largest of n is off by on average. Less where it is the fastest that is late: then there is little that others could
    take over, and so little that the step could seem to gain. While its speed drifts, or those of most do, to follow is
    worth more than not to be deceived."""
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
