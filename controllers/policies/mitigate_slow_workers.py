"""`mitigate_slow_workers`: finds workers that become slow, and takes the remedy that their cost justifies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Observation
from controllers._policy import Policy
from controllers.timing._time_model import TimeModel
from controllers.timing.change_points import BLOCK, ChangePoints, Onset
from controllers.timing.seconds import active_of, check_times, seconds_of

from .balance import balance

SWAP_SECONDS = 0.5  # a join and a split, measured at some 0.02 s, and the joining worker's first step
LATE = 1.25  # a replaced worker is drained if it takes this many times as long as the slowest other one
SHAPE_ERROR = 0.5  # part of a change of size by which the model's time of the new size may be wrong


class MitigationState(NamedTuple):
    """State of `mitigate_slow_workers`. A pytree."""

    balance: Any  # state of the inner policy
    model: TimeModel  # normalizes seconds for batch sizes
    scale: np.ndarray  # shape=(n,), each worker's expected time at its size over that at its first size
    resized: np.ndarray  # shape=(n,), logarithm of the ratio of the latest change of each worker's size
    resized_in: np.ndarray  # shape=(n,), int64: the step of that change
    changes: ChangePoints
    since: np.ndarray  # shape=(n,), int64: first step of each worker's slow phase; 0 for the others
    told: np.ndarray  # shape=(n,), bool: whether the slow phase was reported
    lost: np.ndarray  # shape=(n,), seconds lost to each worker in its slow phase
    replacing: np.ndarray  # shape=(n,), bool: the worker for which another one was requested
    replaced: np.ndarray  # shape=(n,), bool: slow workers for which another one has joined
    active: np.ndarray  # shape=(), int64: number of active workers when a worker was requested


def mitigate_slow_workers(
    *, swap_seconds: float = SWAP_SECONDS, end_seconds: float | None = None, split: Policy | None = None
) -> Policy:
    """Return a policy that balances workers, and replaces those that have become slow with workers of the reserve.

        ctrl.hook(ctrl.mitigate_slow_workers(), comm.all_gather(mon.compute_seconds()), every=5)

    A worker is slow from a change point on: by more than noise explains, and by at least 10 %, its time became longer
    than its own before and than the others'. Changes that most workers share, gradual drift, and pauses of single steps
    do not count. The policy adds up the seconds that a slow worker costs, and takes the next remedy when they exceed
    its cost; so the total cost is at most about twice that of the best choice in hindsight:

    1. *Balance*: the inner policy decides the split throughout.
    2. *Swap*: a worker of the reserve joins. If the others still wait for the slow one then, that gets a share of 0: it
       stays a member without examples. If not, it keeps its smaller batch.
    3. *End*, without a reserve and with `end_seconds`: the run stops as by `control.stop()`.

    Replaces `ctrl.balance()` in the driver. Not for use with policies for the number of workers.

    Args:
      swap_seconds: cost of a swap, in seconds of the run.
      end_seconds: cost of ending and restarting the run elsewhere; by default, the policy does not end it.
      split: the policy that splits the batch, which reads the same value; by default `balance()`.

    Returns:
      A policy for a hook with each worker's compute seconds; shape=(n,), NaN where unknown. Replicated.

    Raises:
      ValueError: a cost is negative.

    References:
      Wu et al. 2024, "Falcon: Pinpointing and Mitigating Stragglers for Large-Scale Hybrid-Parallel Training", section
      5 (escalation as a ski-rental problem).
    """
    if swap_seconds < 0 or (end_seconds is not None and end_seconds < 0):
        raise ValueError(
            "mitigate_slow_workers: swap_seconds and end_seconds must not be negative; got "
            f"{swap_seconds} and {end_seconds}."
        )
    inner = balance() if split is None else split

    def init(n_workers: int) -> MitigationState:
        zeros, steps, none = (np.zeros(n_workers, dtype) for dtype in (float, np.int64, bool))
        of_sizes = inner.init(n_workers), TimeModel.init(n_workers), zeros + 1, zeros, steps
        return MitigationState(*of_sizes, ChangePoints.init(n_workers), steps, none, zeros, none, none, np.asarray(0))

    def update(observation: Observation, state: MitigationState) -> tuple[Decision | None, MitigationState]:
        seconds = seconds_of(observation)
        decision, split_state = inner.update(observation, state.balance)
        state = _learn(observation, seconds, state._replace(balance=split_state))
        if not observation.due:
            return None, state
        notes, state = _reported(state)
        remedy, state = _remedy(observation, state, swap_seconds, end_seconds)
        chosen = remedy or decision or Decision()
        asked = replace(chosen, notes=(*notes, *chosen.notes))
        return (asked if asked or asked.notes else None), state

    def check(values: Sequence[Any], n_workers: int, name: str) -> None:
        check_times(values, n_workers, name)
        inner.check(tuple(values), n_workers, inner.name)

    return Policy(init, update, "mitigate_slow_workers", ("seconds",), check)


def _learn(observation: Observation, seconds: np.ndarray, state: MitigationState) -> MitigationState:
    """Return the state after a step: the model of times, change points, and seconds lost."""
    sizes = np.asarray(observation.previous_batch_sizes)
    state = _resized(observation.step, sizes, state)
    model = state.model.observe(sizes, seconds)
    took = np.where(sizes > 0, seconds, np.nan)
    changes, onsets = state.changes.observe(took / state.scale, model.pace.noise)
    changes = changes.without([o.worker_slot for o in onsets if _explained_by_size(observation.step, o, state)])
    since, told = np.where(changes.slow, state.since, 0), state.told & changes.slow
    counts = np.ones(len(sizes))  # steps whose loss is to be added: at an onset, all since then
    for onset in onsets:
        if changes.slow[onset.worker_slot]:
            since[onset.worker_slot] = max(observation.step - onset.steps, 1)  # seconds are those of the step before
            counts[onset.worker_slot] = onset.steps
    lost = np.where(changes.slow, state.lost, 0.0) + _lost(sizes, took, changes.factor, counts)
    replaced = state.replaced & changes.slow
    return state._replace(model=model, changes=changes, since=since, told=told, lost=lost, replaced=replaced)


def _resized(step: int, sizes: np.ndarray, state: MitigationState) -> MitigationState:
    """Return the state with the changes of size between the latest two steps, by the model's times at the change.

    What the model learns about these sizes later must not look like a change of speed.
    """
    before, times = state.model.sizes, state.model.line
    changed = (before != sizes) & (before > 0) & (sizes > 0)
    if not changed.any():
        return state
    before = np.maximum(before, 1)
    now = np.where(changed, sizes, before)
    return state._replace(
        scale=state.scale * np.where(changed, times(now) / times(before), 1.0),
        resized=np.where(changed, np.log(now / before), state.resized),
        resized_in=np.where(changed, step, state.resized_in),
    )


def _explained_by_size(step: int, onset: Onset, state: MitigationState) -> bool:
    """Return whether a change may be an error of the model, which knew no time of a new size."""
    slot = onset.worker_slot
    near = abs(step - onset.steps - int(state.resized_in[slot])) <= 2 * BLOCK
    return near and math.log(onset.factor) < SHAPE_ERROR * abs(float(state.resized[slot]))


def _lost(sizes: np.ndarray, seconds: np.ndarray, factor: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the seconds lost to each worker in `steps` steps like this one; shape=(n,).

    Others wait for it, and with its former speed the step, ideally split, would be shorter.
    """
    known = (seconds > 0) & (seconds < np.inf)
    lost = np.zeros(len(sizes))
    speeds = np.where(known, sizes / np.where(known, seconds, 1.0), 0.0)
    for slot in np.flatnonzero((factor > 1) & known).tolist():
        others = np.delete(seconds, slot)
        waits = max(0.0, float(seconds[slot]) - float(np.nanmax(others, initial=0.0)))
        healed = speeds.sum() + (factor[slot] - 1) * speeds[slot]
        lost[slot] = steps[slot] * (waits + sizes.sum() / speeds.sum() - sizes.sum() / healed)
    return lost


def _reported(state: MitigationState) -> tuple[tuple[str, ...], MitigationState]:
    """Return notes on slow phases that were not reported yet."""
    factor, since = state.changes.factor, state.since
    new = np.flatnonzero((since > 0) & ~state.told).tolist()
    notes = (f"worker {i} takes {factor[i]:.2f} times as long as before, since step {since[i]}" for i in new)
    return tuple(notes), state._replace(told=since > 0)


def _remedy(
    observation: Observation, state: MitigationState, swap_seconds: float, end_seconds: float | None
) -> tuple[Decision | None, MitigationState]:
    """Return the remedy that the seconds lost justify, or None to leave it to the split."""
    active, members = active_of(observation), len(observation.members)
    if state.replacing.any():
        return _continue_swap(observation, state)
    lost = np.where(state.replaced, 0.0, state.lost)
    slot = int(active[lost[active].argmax()])
    cost = float(lost[slot])
    if not cost or observation.target_workers != members:
        return None, state
    said = f"worker {slot} has cost {cost:.3g} s, more than a"
    if observation.most_workers > members:
        if cost < swap_seconds:
            return None, state
        note = f"{said} swap ({swap_seconds:.3g} s): a worker of the reserve joins"
        asked = state._replace(replacing=np.arange(len(state.lost)) == slot, active=np.asarray(len(active)))
        return Decision(workers=members + 1, notes=(note,)), asked
    if end_seconds is None or cost < end_seconds:
        return None, state
    return Decision(stop=True, notes=(f"{said} restart ({end_seconds:.3g} s): the run ends",)), state


def _continue_swap(observation: Observation, state: MitigationState) -> tuple[Decision | None, MitigationState]:
    """Drain the slow worker, once its replacement has examples, if the others wait for it."""
    sizes, active, slow = np.asarray(observation.batch_sizes), active_of(observation), state.replacing
    done = state._replace(replacing=np.zeros_like(slow))
    if observation.target_workers != len(observation.members):
        return None, state  # the replacement prepares
    if len(active) <= state.active:  # it is gone, or another hook has changed the request
        return None, done
    if not sizes[active].all():
        return None, state
    done, seconds = done._replace(replaced=state.replaced | slow), seconds_of(observation)
    if not seconds[slow].max() > LATE * np.nanmax(seconds[~slow], initial=0.0):
        return None, done
    note = f"worker {slow.argmax()} drained: its examples go to the worker that has joined"
    return Decision(shares=tuple(np.where(slow, 0.0, sizes).tolist()), notes=(note,)), done
