"""`balance`: the policy that splits the global batch so that all workers finish at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Limits, Observation
from controllers._policy import Policy
from controllers.timing._allocate import allocate, water_level
from controllers.timing._batch_time import BatchTime
from controllers.timing._time_model import TimeModel
from controllers.timing.seconds import active_of, check_times, inputs_of, seconds_of, shares_of
from controllers.timing.stretch import Stretch

from .comparison import Comparison

BAND = 3.0  # standard deviations of noise that a gain must exceed
STRETCH = 0.025  # seconds: 50 times what one update of the model costs on a slow core
LOSS = 0.02  # of a split by multiples of a quantum, relative to the best split
GROWTH = 2.0  # times at sizes beyond this multiple of the largest measured one are extrapolated too far
MOST_UNMEASURED = 100  # steps without measurements, after which a split by earlier ones is given up
NO_LINKS = frozenset({"compute_seconds", "iteration_seconds", "cpu_available", "memory_available"})  # sources
REST = 4  # stretches between two decisions, where a stretch is several steps and no splits are compared


class BalanceState(NamedTuple):
    """State of `balance`. A pytree."""

    stretch: Stretch
    steps: np.ndarray  # shape=(), int64: steps in the latest stretch; 0 before the first
    model: TimeModel
    comparison: Comparison
    rests_until: np.ndarray  # shape=(), int64: number of the first step after which the policy decides again
    unmeasured: np.ndarray  # shape=(), int64: the latest steps in a row in which a worker's seconds were not known
    moved: np.ndarray  # shape=(), bool: whether the present split is one of this policy


def balance(*, dead_band: float = 0.02, stretch_seconds: float = STRETCH) -> Policy:
    """Split the global batch so that the slowest worker finishes as early as possible.

        seconds = comm.all_gather(mon.compute_seconds())
        ctrl.hook(ctrl.balance(), seconds, every=10)

    Fits each worker's step time against its batch size, `t_i(b) = max(floor_i, slope_i b + intercept_i)`, and solves
    exactly for the integer split with the smallest `max_i t_i(b_i)`. Splits whatever global batch other hooks request.

    Reacts to a change of speed after the first step that shows it, if the gain exceeds the noise; after the second one
    if recent changes were pauses. Drifting speeds are extrapolated. If steps turn out to be longer than with the split
    before, the policy goes back to it, and waits before the next change, longer after each one in vain. It goes back to
    equal shares after 100 steps in a row that were not measured on all workers, such as beside a compiler.

    Sizes are multiples of the largest power of two that makes the step at most 2 % longer than the best split. The
    time of a size includes the overhead of its microbatches (`Limits.call_overhead`).

    *Links.* In a federated program a round is some local steps and the transfer of a model. A second value of the hook
    has the seconds of each worker's link, such as bytes over bandwidth; the policy then balances the sum of both.

        ctrl.hook(ctrl.balance(dead_band=0.05), seconds, link_seconds)

    Args:
      dead_band: the least predicted gain, as a fraction of the slowest worker's step. The gain must also exceed the
        noise, and the uncertainty of predicted times.
      stretch_seconds: steps at the same sizes are averaged over stretches of this many seconds; 0 makes every step a
        stretch. The policy decides at a due step after a stretch, or after four while no two splits are compared.

    Returns:
      A policy for a hook with each worker's compute seconds, shape=(n,), NaN where unknown, and, if links differ, the
      seconds of each worker's link, shape=(n,). Replicated. Requests nothing while one of them is unknown.

    Raises:
      ValueError: an argument is out of range.

    References:
      Chen et al. 2020, "Semi-Dynamic Load Balancing" (LB-BSP), for the problem and the model of time; Chen et al. 2021,
      doi 10.1109/TCC.2021.3102593, for rounds with links.
    """
    if min(dead_band, stretch_seconds) < 0:
        raise ValueError(
            f"balance: dead_band and stretch_seconds must not be negative; got {dead_band} and {stretch_seconds}."
        )

    def init(n: int) -> BalanceState:
        none = np.asarray(0)
        parts = Stretch.init(n), none, TimeModel.init(n), Comparison.init(n), none, none, np.asarray(False)
        return BalanceState(*parts)

    def update(observation: Observation, state: BalanceState) -> tuple[Decision | None, BalanceState]:
        state = learn(observation, state)
        if observation.due and state.moved and state.unmeasured >= MOST_UNMEASURED:
            note = f"back to equal shares: {int(state.unmeasured)} steps in a row were not measured on all workers"
            fresh = init(len(observation.batch_sizes))._replace(unmeasured=state.unmeasured)
            return _asked(np.ones(len(active_of(observation))), observation, note), fresh
        if not observation.due or observation.step < int(state.rests_until) or not state.model.waiting:
            return None, state
        decision, comparison = decide(observation, state)
        stretches = (comparison.missing or REST) if state.steps > 1 else 0
        return decision, state._replace(
            model=state.model._replace(waiting=np.asarray(0)),
            comparison=comparison,
            rests_until=np.asarray(observation.step + stretches * state.steps),
            moved=state.moved | (decision is not None),
        )

    def learn(observation: Observation, state: BalanceState) -> BalanceState:
        seconds, links, ran = seconds_of(observation), _links(observation), observation.previous_batch_sizes
        missing = not np.isfinite(seconds[np.asarray(ran) > 0]).all()
        stretch, ended = state.stretch.add(ran, seconds + links, stretch_seconds)
        for latest in ended:
            model, before = state.model, int(state.steps)
            if before and latest.steps != before:
                model = model._replace(pace=model.pace.with_longer_means(latest.steps / before))
            model = model.observe(latest.sizes, latest.seconds - links)
            comparison = state.comparison.see(latest.sizes, latest.slowest, bool(model.pace.jumped.any()))
            state = state._replace(steps=np.asarray(latest.steps), model=model, comparison=comparison)
        return state._replace(stretch=stretch, unmeasured=np.asarray(state.unmeasured + 1 if missing else 0))

    def decide(observation: Observation, state: BalanceState) -> tuple[Decision | None, Comparison]:
        """Go back to the split before if the present one is worse; or take a better one."""
        sizes, total = np.asarray(observation.batch_sizes), observation.global_batch
        back, comparison = state.comparison.verdict(sizes, total)
        if back is not None:
            note = "changing back: steps were measured to be longer than before"
            return _asked(back[active_of(observation)], observation, note), comparison
        found = _prospect(observation, state.model, dead_band)
        if isinstance(found, str) or not found.is_worth(found.ideal):
            return None, comparison
        split, seconds = _best_split(found, observation.limits)
        then = float(seconds.max())
        gain, others_ask = 1 - then / found.now, total != sizes.sum()
        if not found.is_worth(then) or not (others_ask or comparison.allows(gain, int(state.steps))):
            return None, comparison
        note = f"slowest worker expected at {1e3 * then:.3g} ms a step, down from {1e3 * found.now:.3g} ms"
        return _asked(split, observation, note), comparison.moved(gain)

    def why(observation: Observation, state: BalanceState) -> str:
        found = _prospect(observation, state.model, dead_band)
        if isinstance(found, str):
            return found
        gain = max(0.0, 1 - found.ideal / found.now)
        said = f"no split can take more than {gain:.1%} off the slowest worker's {1e3 * found.now:.3g} ms a step"
        if found.band >= 1:
            return f"{said}, as far as the few and uneven times until now tell"
        if not found.is_worth(found.ideal):
            return f"{said}, and a change needs {found.band:.1%}"
        return f"{said}; none was found that is worth a change, or the last ones did not help when they were tried"

    reads = "seconds", "link_seconds"
    return Policy(init, update, "balance", reads, _check, lambda state: int(state.rests_until), why)


def _check(values: Sequence[Any], n_workers: int, policy: str) -> None:
    check_times(values, n_workers, policy)
    measured = sorted(NO_LINKS.intersection(*(getattr(value, "sources", ()) for value in values[1:2])))
    if len(values) > 2 or (len(values) == 2 and measured):
        got = f"one of {', '.join(measured)}" if len(values) == 2 else f"{len(values)} values"
        raise ValueError(
            f"{policy} reads each worker's compute seconds and, if links differ, the seconds of its link; got {got}. "
            f"For a split by other measurements, use lb_bsp(arx(), n_inputs={len(values) - 1})."
        )


def _links(observation: Observation) -> np.ndarray | float:
    """Return the seconds of each worker's link; 0 if the hook has none."""
    return 0.0 if len(observation.values) == 1 else inputs_of(observation)[:, 0]


def _asked(split: np.ndarray, observation: Observation, note: str) -> Decision:
    """Return the decision for a split over the active workers."""
    return Decision(shares=shares_of(split, active_of(observation), len(observation.batch_sizes)), notes=(note,))


class _Prospect(NamedTuple):
    """The present split of active workers, and the best that another one can reach."""

    total: int  # the requested batch
    times: BatchTime  # with the links
    stay: np.ndarray  # the present split, scaled to the requested batch
    seconds: np.ndarray  # of each worker with it
    least: np.ndarray  # bounds of the sizes for which times are trusted
    most: np.ndarray
    now: float  # seconds of the slowest worker
    ideal: float  # a lower bound of them with any split
    band: float  # the least relative gain that is worth a change

    def is_worth(self, seconds: float) -> bool:
        """Return whether a split with so many seconds of the slowest worker is worth a change."""
        return self.now - seconds > self.band * self.now


def _prospect(observation: Observation, model: TimeModel, dead_band: float) -> _Prospect | str:
    """Return how long steps take with the present split, and at least with any; or why that is not known."""
    total, limits, active = observation.global_batch, observation.limits, active_of(observation)
    if model.waiting > 1 or model.pace.trust < 0.5:  # a jump that one step of several shows may be a pause
        model = model._replace(pace=model.pace.without_jumps(model.pace.jumped))
    model, links = model.of(active), np.broadcast_to(_links(observation), len(limits.lower))[active]
    lower, upper = limits.arrays.lower[active], limits.arrays.upper[active]
    sizes = np.asarray(observation.batch_sizes)[active]
    if len(active) == 1:
        return "only one worker takes examples"
    if not model.measured.all():
        return f"no seconds of workers {_listed(active[~model.measured])} are known yet"
    if not (links >= 0).all():
        return f"the link seconds of workers {_listed(active[~(links >= 0)])} are not known"
    if not lower.sum() <= total <= upper.sum():
        return f"the global batch of {total} is outside the workers' limits"
    if not sizes.all():
        return f"workers {_listed(active[sizes == 0])} have joined, and were not measured yet"
    stay = sizes * (total / sizes.sum())
    slope, intercept, floor = model.fit()
    times = BatchTime(slope, intercept + links, floor + links)
    seconds = times(stay)
    most = np.ceil(np.maximum(GROWTH * model.largest, np.sqrt(GROWTH) * stay)).astype(np.int64)
    most = np.minimum(upper, most)
    # Shrinking risks less: a wrong guess costs the other workers little.
    least = np.maximum(lower, (np.minimum(model.smallest, stay) / GROWTH**2).astype(np.int64))
    least = lower if least.sum() > total else least
    most = upper if most.sum() < total else most
    now, band = float(seconds.max()), max(dead_band, _noise_band(model, stay, seconds, links))
    return _Prospect(total, times, stay, seconds, least, most, now, water_level(total, times, least, most), band)


def _best_split(found: _Prospect, limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    """Return the split with the least time, and the workers' seconds, including the overhead of microbatches.

    Multiples of a large quantum need few microbatches. The largest quantum that loses less than `LOSS` is taken.
    """
    total, stay, unit = found.total, found.stay, limits.multiple
    overhead = limits.call_overhead * found.seconds / stay  # seconds of another microbatch
    largest = unit << max(0, (total // unit // len(stay)).bit_length() - 1)
    quantum = largest if limits.call_overhead else max(limits.quantum, unit)
    splits: list[tuple[np.ndarray, np.ndarray]] = []
    while quantum >= unit:
        split = allocate(total, found.times, found.least, found.most, quantum, near=stay)
        calls = np.bitwise_count(np.maximum(split // unit, 1)).astype(int)
        more = np.where(split == stay, 0, calls - 1)  # measured seconds of the present sizes include theirs
        splits.append((split, found.times(split) + overhead * more))
        if splits[-1][1].max() <= found.ideal * (1 + LOSS):
            break
        quantum //= 2
    best = min(seconds.max() for _, seconds in splits)
    return next((split, seconds) for split, seconds in splits if seconds.max() <= best * (1 + LOSS))


def _noise_band(model: TimeModel, sizes: np.ndarray, seconds: np.ndarray, links: np.ndarray) -> float:
    """Return the relative gain that noise alone can promise: `BAND` deviations above the expected maximum of n workers.

    0 while the slowest worker's speed drifts, or most workers' do, because following is then worth more.
    """
    n, slowest = len(seconds), np.argmax(seconds)
    unsettled = model.pace.unsettled
    if unsettled[slowest] or 2 * unsettled.sum() >= n:
        return 0.0
    variance = model.variance(sizes) * (1 - links / seconds) ** 2
    others = (variance.sum() - variance[slowest]) / (n - 1) ** 2
    speeds = sizes / seconds
    part = 1 - speeds[slowest] / speeds.sum()
    return float(part * np.sqrt(variance[slowest] + others) * (BAND + np.sqrt(2 * np.log(n))))


def _listed(workers: np.ndarray) -> str:
    return ", ".join(map(str, workers.tolist()))
