"""Other policies on a recorded run: on its observations, or on a simulated cluster fitted to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.decision import Decision
from adaptive.base.errors import RecordError
from adaptive.control.slot_reset import reset_slots
from controllers._policy import Policy
from controllers.timing._batch_time import BatchTime
from controllers.timing._time_model import TimeModel

from ._cluster import Cluster, Trace, by_step
from ._recording import RecordedStep, Recording

WINDOW = 10  # steps over which a worker's speed is assumed to be constant


def replay(
    policy: Policy, recording: Recording, hook: str, reads: Sequence[str] | None = None, every: int | None = None
) -> list[tuple[int, Decision]]:
    """Run a policy on the recorded observations of a hook. Its decisions have no effect.

    Args:
      hook: the hook's name in the trace.
      reads: names of the hook's values that the policy receives; by default all, unchanged.
      every: it decides after each step whose number is a multiple of this; by default as that hook did.

    Returns:
      (step, decision) of each decision.

    Raises:
      RecordError: the run has no such hook, or the hook not all of these values.
    """
    if hook not in recording.hooks:
        raise RecordError(f"this run has no hook {hook!r}; its hooks are: {', '.join(recording.hooks) or 'none'}.")
    every = every or recording.hooks[hook].every
    state, asked = policy.init(recording.workers), []
    for step in recording.steps:
        if hook not in step.hooks:
            continue
        if step.seen.joined:
            state = reset_slots(state, policy.init, recording.workers, step.seen.joined)
        values = _values(recording, hook, step, reads)
        policy.check(values, recording.workers, policy.name)
        observation = step.seen._replace(values=values, due=step.seen.step % every == 0)
        decision, state = policy.update(observation, state)
        if observation.due and decision:
            asked.append((step.seen.step, decision))
    return asked


def _values(recording: Recording, hook: str, step: RecordedStep, reads: Sequence[str] | None) -> tuple[Any, ...]:
    signals = recording.signals(hook, step)
    reads = tuple(signals) if reads is None else reads
    if missing := [name for name in reads if name not in signals]:
        known = ", ".join(signals) or "nothing"
        raise RecordError(f"the policy reads {', '.join(missing)}, but hook {hook!r} received {known}.")
    return tuple(signals[name] for name in reads)


class Fit(NamedTuple):
    """The workers' properties as fitted to a run."""

    cluster: Cluster
    certain: np.ndarray  # shape=(n,), bool: whether sizes changed enough to determine how time depends on them


def fit(recording: Recording) -> Fit:
    """Fit a cluster to a run: each worker's time as a function of its batch, its speed over time, and its noise.

    With the run's sizes, the cluster takes exactly the measured seconds; with others, those of `balance`'s model.

    Raises:
      RecordError: the run has no compute seconds of a worker.
    """
    seconds, sizes = recording.seconds, recording.sizes
    busy = sizes > 0
    unknown = busy.any(axis=0) & ~(busy & np.isfinite(seconds)).any(axis=0)
    if unknown.any():
        missing = ", ".join(map(str, np.flatnonzero(unknown)))
        raise RecordError(f"the run has no compute seconds of worker {missing}.")
    model = TimeModel.init(recording.workers)
    for ran, took in zip(sizes, seconds, strict=True):
        model = model.observe(ran, took)
    relative = _filled(np.where(busy, seconds / model.line(np.maximum(sizes, 1)), np.nan))
    usual = np.median(relative, axis=0)
    padded = np.pad(relative, ((WINDOW // 2, WINDOW // 2), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * (WINDOW // 2) + 1, axis=0)
    level = np.median(windows, axis=-1)
    overhead = np.array([step.seconds for step in recording.steps]) - np.where(busy, seconds, 0.0).max(axis=1)
    cluster = Cluster(
        BatchTime(*(usual * part for part in model.line)),
        slowdown=by_step(level / usual),
        noise=lambda rng, steps, workers: np.resize(relative / level, (steps, workers)),
        lower=np.array(recording.limits.lower),
        upper=np.array(recording.limits.upper),
        quantum=recording.limits.quantum,
        overhead=max(0.0, float(np.nanmedian(overhead))),
        cpu=_trace(recording.series("cpu_available")),
        memory=_trace(recording.series("memory_available")),
        present=None if busy.all() else lambda step: busy[min(step, len(busy)) - 1],
    )
    certain = sizes.max(axis=0) >= 1.1 * np.where(busy, sizes, np.iinfo(np.int64).max).min(axis=0)
    return Fit(cluster, certain)


def _trace(rows: np.ndarray | None) -> Trace | None:
    """Return a recorded sensor as a trace, unchanged: the load by other jobs does not depend on batch sizes."""
    return None if rows is None else by_step(_filled(rows))


def _filled(rows: np.ndarray) -> np.ndarray:
    """Fill unknown numbers with the ones before, the first ones with the first known; 1 if none is known."""
    known = np.isfinite(rows)
    last = np.maximum.accumulate(np.where(known, np.arange(len(rows))[:, None], -1), axis=0)
    filled = np.take_along_axis(rows, np.where(last < 0, known.argmax(axis=0), last), axis=0)
    return np.where(known.any(axis=0), filled, 1.0)
