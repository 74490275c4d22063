"""Hyperparameters that follow the run: by epochs or examples, by a metric that gets no better, by the global batch.

A schedule that counts steps is cut short, or cut off, by a batch that grows: a cosine planned for 132 steps of 64 ended
at 44 % of its peak when 80 steps were all there were. These count examples, whatever the steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np

from adaptive.extend import Decision, Observation, real
from controllers._policy import Policy

Schedule = Callable[[float], Any]


def by_epochs(**schedules: Schedule) -> Policy:
    """Set hyperparameters by epochs of data consumed, as a fraction.

        lr = ad.hyperparameter("lr", 0.1)
        ctrl.hook(ctrl.by_epochs(lr=optax.cosine_decay_schedule(0.1, decay_steps=30)))    # over 30 epochs

    Args:
      **schedules: by the hyperparameter's name a function of epochs, such as an optax schedule whose steps are epochs.

    Returns:
      A policy for a hook without values. It asks where a schedule's value is another than the one in force.
    """
    return _scheduled("by_epochs", schedules, lambda seen: seen.epoch)


def by_examples(per_epoch: int, **schedules: Schedule) -> Policy:
    """As `by_epochs`, by examples.

    Args:
      per_epoch: examples in the data set.
      **schedules: by the hyperparameter's name a function of examples consumed.
    """
    return _scheduled("by_examples", schedules, lambda seen: seen.epoch * per_epoch)


def _scheduled(name: str, schedules: Mapping[str, Schedule], at: Callable[[Observation], float]) -> Policy:
    if not schedules or not all(map(callable, schedules.values())):
        raise ValueError(
            f"{name}: give a function for each hyperparameter, such as  {name}(lr=lambda at: 0.1 / (1 + at)); got "
            f"{dict(schedules)}."
        )

    def update(observation: Observation, state: tuple[()]) -> tuple[Decision | None, tuple[()]]:
        if not observation.due:
            return None, state
        wanted = {of: np.asarray(schedule(at(observation))).tolist() for of, schedule in schedules.items()}
        return _changes(observation, wanted), state

    return Policy(lambda n_workers: (), update, name)


class PlateauState(NamedTuple):
    """What `plateau` remembers."""

    best: Any  # float64: of the metric
    since: Any  # int64: values shown since then
    total: Any  # float64: of the values of this turn
    count: Any  # int64


def plateau(
    hyperparameter: str,
    *,
    factor: float = 0.1,
    patience: int = 10,
    least: float = 0.0,
    threshold: float = 1e-4,
    mode: Literal["min", "max"] = "min",
) -> Policy:
    """Multiply a hyperparameter when a metric has got no better for some time.

        ctrl.hook(ctrl.plateau("lr", factor=0.5, patience=5), loss, every=100)

    Args:
      hyperparameter: which.
      factor: by which it is multiplied.
      patience: turns of the hook without a better value that are put up with. A turn's value is the mean over its
        steps; where none is known (NaN), the turn does not count.
      least: it is not taken below this.
      threshold: how much better, relatively, is better.
      mode: whether less is better, or more.

    Returns:
      A policy for a hook that is given the metric: a replicated number.
    """
    if mode not in ("min", "max") or factor <= 0 or patience < 0 or threshold < 0:
        raise ValueError(
            f"plateau: mode is 'min' or 'max', factor positive, patience and threshold not negative; got "
            f"mode={mode!r}, factor={factor}, patience={patience}, threshold={threshold}."
        )
    sign = 1.0 if mode == "min" else -1.0

    def init(n_workers: int) -> PlateauState:
        del n_workers
        return PlateauState(np.asarray(inf), np.asarray(0), np.asarray(0.0), np.asarray(0))

    def update(observation: Observation, state: PlateauState) -> tuple[Decision | None, PlateauState]:
        value = sign * _one_number(observation)
        if np.isfinite(value):
            state = state._replace(total=state.total + value, count=state.count + 1)
        if not observation.due or not state.count:
            return None, state
        mean = float(state.total / state.count)
        state = state._replace(total=np.asarray(0.0), count=np.asarray(0))
        if not np.isfinite(state.best) or mean < state.best - threshold * abs(state.best):
            return None, state._replace(best=np.asarray(mean), since=np.asarray(0))
        if state.since < patience:
            return None, state._replace(since=state.since + 1)
        known = observation.hyperparameters
        wanted = max(known[hyperparameter] * factor, least) if hyperparameter in known else least
        return _changes(observation, {hyperparameter: wanted}), state._replace(since=np.asarray(0))

    return Policy(init, update, "plateau", ("metric",))


def momentum_of_batch(hyperparameter: str, momentum: float, base: int) -> Policy:
    """Have a momentum, or the rate of a moving average, remember as many examples with any global batch.

        ctrl.hook(ctrl.momentum_of_batch("momentum", 0.9, base=64))

    A step of s times the batch is s steps: what was kept of an old value in each, `momentum`, is kept s times over:
    momentum ** (batch / base) (Busbridge et al. 2023, "How to scale your EMA", for moving averages).

    Args:
      hyperparameter: which.
      momentum: what it is at the batch `base`; from 0 to 1.

    Returns:
      A policy for a hook without values.
    """
    if not 0 <= momentum < 1 or base < 1:
        raise ValueError(f"momentum_of_batch: momentum is from 0 to 1, base 1 or more; got {momentum} and {base}.")

    def update(observation: Observation, state: tuple[()]) -> tuple[Decision | None, tuple[()]]:
        wanted = float(momentum ** (observation.global_batch / base))
        return _changes(observation, {hyperparameter: wanted}) if observation.due else None, state

    return Policy(lambda n_workers: (), update, "momentum_of_batch")


def _changes(observation: Observation, wanted: Mapping[str, Any]) -> Decision | None:
    """What of it is not so already, to the precision that it is kept in; of unknown names the program says so."""
    known = observation.hyperparameters
    changed = {name: v for name, v in wanted.items() if name not in known or not np.allclose(known[name], v, 1e-7, 0)}
    return Decision(hyperparameters=changed) if changed else None


def _one_number(observation: Observation) -> float:
    number = real(observation.values[0]) if len(observation.values) == 1 else None
    if number is None:
        raise ValueError(f"plateau: give its hook one number, such as a loss; it was given {observation.values!r}.")
    return number
