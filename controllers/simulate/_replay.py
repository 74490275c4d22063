"""Other policies on a recorded run: on its observations, or on a simulated cluster fitted to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Observation
from adaptive.control.slot_reset import reset_slots
from controllers._policy import Policy
from controllers.timing._batch_time import BatchTime

from ._cluster import Cluster, Trace, by_step
from ._recording import RecordedRequests, RecordedStep, Recording, TraceError

WINDOW = 10  # steps over which a worker's speed is assumed to be constant
FLOOR_GAIN = 0.15  # a floor is used if it reduces the error by this fraction
_UNKNOWN = (1.0, 0.0, 0.0)  # slope, intercept and floor of a worker that never had examples


# --- on the recorded observations -------------------------------------------------------------------------------------


def replay(
    policy: Policy, recording: Recording, hook: str, reads: Sequence[str] | None = None, every: int | None = None
) -> list[tuple[int, Decision]]:
    """Run a policy on the recorded observations of a hook. Its decisions have no effect.

    Args:
      policy: the policy.
      recording: the run.
      hook: the hook's name in the trace.
      reads: names of the hook's values that the policy receives; by default all, unchanged.
      every: it decides after each step whose number is a multiple of this; by default as that hook did.

    Returns:
      (step, decision) of each decision.

    Raises:
      TraceError: the run has no such hook, or the hook not all of these values.
    """
    if hook not in recording.hooks:
        raise TraceError(f"this run has no hook {hook!r}; its hooks are: {', '.join(recording.hooks) or 'none'}.")
    every = every or recording.hooks[hook].every
    state, asked = policy.init(recording.workers), []
    following = [*recording.steps[1:], recording.steps[-1]]
    for step, then in zip(recording.steps, following, strict=True):
        if not step.hooks.get(hook):
            continue
        if step.joined:
            state = reset_slots(state, policy.init, recording.workers, step.joined)
        observation = _observation(recording, step, then, _values(recording, hook, step, reads), step.step % every == 0)
        decision, state = policy.update(observation, state)
        if observation.due and decision:
            asked.append((step.step, decision))
    return asked


def _observation(
    recording: Recording, step: RecordedStep, then: RecordedStep, values: tuple[Any, ...], due: bool
) -> Observation:
    """Return a hook's recorded observation. Old records lack the requests; they are taken from the next step."""
    asked = step.asked
    if asked is None:
        active = tuple(worker for worker, size in enumerate(then.batch_sizes) if size > 0)
        asked = RecordedRequests(sum(then.batch_sizes), active, (len(step.members),) * 3)
    target, least, most = asked.workers
    takes_part = [worker in asked.active for worker in range(recording.workers)]
    return Observation(
        step=step.step,
        epoch=step.epoch,
        values=values,
        batch_sizes=step.batch_sizes,
        previous_batch_sizes=step.previous_batch_sizes,
        global_batch=asked.global_batch,
        limits=recording.limits.of(takes_part)._replace(call_overhead=step.call),
        due=due,
        members=step.members,
        joined=step.joined,
        target_workers=target,
        least_workers=least,
        most_workers=most,
        hyperparameters=step.hyperparameters,
        examples=step.examples,
    )


def _values(recording: Recording, hook: str, step: RecordedStep, reads: Sequence[str] | None) -> tuple[Any, ...]:
    signals = recording.signals(hook, step)
    if reads is None:
        return tuple(signals.values())
    missing = [name for name in reads if name not in signals]
    if missing:
        known = ", ".join(signals) or "nothing"
        raise TraceError(f"the policy reads {', '.join(missing)}, but hook {hook!r} received {known}.")
    return tuple(signals[name] for name in reads)


# --- on a cluster fitted to the run -----------------------------------------------------------------------------------


class Fit(NamedTuple):
    """The workers' properties as fitted to a run."""

    cluster: Cluster
    certain: np.ndarray  # shape=(n,), bool: whether sizes changed enough to determine how time depends on them
    global_batch: np.ndarray  # shape=(steps,)


def fit(recording: Recording) -> Fit:
    """Fit a cluster to a run: each worker's time as a function of its batch, its speed over time, and its noise.

    With the run's sizes, the cluster takes exactly the measured seconds. With other sizes, it takes the fitted time at
    the speed and with the noise of that step. The fit minimizes changes of speed at changes of size.

    Raises:
      TraceError: the run has no compute seconds of a worker.
    """
    seconds, sizes = recording.seconds, recording.sizes
    busy = sizes > 0
    unknown = busy.any(axis=0) & np.isnan(seconds).all(axis=0)
    if unknown.any():
        missing = ", ".join(map(str, np.flatnonzero(unknown)))
        raise TraceError(f"the run has no compute seconds of worker {missing}.")
    seconds = np.stack([_filled(column) for column in np.where(busy, seconds, np.nan).T], axis=1)
    curves = [
        _shape(b[on], t[on]) if on.any() else _UNKNOWN for b, t, on in zip(sizes.T, seconds.T, busy.T, strict=True)
    ]
    times = BatchTime(*(np.array(part) for part in zip(*curves, strict=True)))
    relative = np.where(busy, seconds / times(np.maximum(sizes, 1)), np.nan)
    relative = np.stack([_filled(column) for column in relative.T], axis=1)
    level = np.stack([_running_median(column, WINDOW) for column in relative.T], axis=1)
    residue = relative / level
    overhead = np.array([step.seconds for step in recording.steps]) - np.where(busy, seconds, 0.0).max(axis=1)
    cluster = Cluster(
        times,
        slowdown=by_step(level),
        noise=lambda rng, steps, workers: np.resize(residue, (steps, workers)),
        lower=np.array(recording.limits.lower),
        upper=np.array(recording.limits.upper),
        quantum=recording.limits.quantum,
        overhead=max(0.0, float(np.median(overhead))),
        cpu=_trace(recording.series("cpu_available")),
        memory=_trace(recording.series("memory_available")),
        present=None if busy.all() else lambda step: busy[min(step, len(busy)) - 1],
    )
    certain = sizes.max(axis=0) >= 1.1 * np.where(busy, sizes, np.iinfo(np.int64).max).min(axis=0)
    return Fit(cluster, certain, sizes.sum(axis=1))


def _trace(rows: np.ndarray | None) -> Trace | None:
    """Return a recorded sensor as a trace, unchanged: the load by other jobs does not depend on batch sizes."""
    return None if rows is None else by_step(np.stack([_filled(column) for column in rows.T], axis=1))


def _filled(column: np.ndarray) -> np.ndarray:
    """Fill unknown step times with the time before, the first ones with the first known; 1 if none is known."""
    known = np.isfinite(column)
    if not known.any():
        return np.ones_like(column)
    last = np.maximum.accumulate(np.where(known, np.arange(len(column)), -1))
    return column[np.where(last < 0, np.argmax(known), last)]


def _shape(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float, float]:
    """Fit slope, intercept and floor of a worker's relative time by a search over candidates.

    Compares the ratio of times after and before each change of size with a candidate's. Minimizes the sum of absolute
    errors, which tolerates large changes of speed at a few of these steps. Without any change, time is proportional.
    """
    small, large, ratio, weight = _steps_in_size(sizes, np.log(seconds))
    middle = float(np.median(sizes))
    knees = np.unique(np.quantile(sizes, [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0]))
    e, knee = (grid.ravel()[:, None] for grid in np.meshgrid(np.linspace(0.0, 1.0, 41), knees, indexing="ij"))
    lines = BatchTime(e / middle, 1 - e)
    floor = np.where(knee == knees[0], 0.0, lines(knee))
    curves = lines._replace(floor=floor)
    expected = np.log(curves(np.concatenate([small, large])))
    left = (weight * np.abs(ratio - np.diff(expected.reshape(len(e), 2, -1), axis=1)[:, 0])).sum(axis=1)
    judged = left * np.where(floor > 0, 1 + FLOOR_GAIN, 1.0)[:, 0] + 1e-3 * (1 - e)[:, 0]
    best = int(np.argmin(judged))
    return float(e[best, 0] / middle), float(1 - e[best, 0]), float(floor[best, 0])


def _steps_in_size(sizes: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the changes of size as columns: old size, new size, change of the median time, and its weight.

    Medians are over up to `WINDOW` steps before and after the change.
    """
    starts = np.concatenate([[0], 1 + np.flatnonzero(np.diff(sizes)), [len(sizes)]])
    rows = []
    for start, change, end in zip(starts[:-2], starts[1:-1], starts[2:], strict=True):
        before, after = times[max(start, change - WINDOW) : change], times[change : min(end, change + WINDOW)]
        weight = (1 / len(before) + 1 / len(after)) ** -0.5
        rows.append((sizes[change - 1], sizes[change], np.median(after) - np.median(before), weight))
    return tuple(np.array(rows, np.float64).reshape(-1, 4).T)


def _running_median(values: np.ndarray, window: int) -> np.ndarray:
    half = window // 2
    padded = np.pad(values, (half, half), mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
