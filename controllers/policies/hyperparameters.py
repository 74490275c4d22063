"""Hyperparameters set by epochs or examples, by a metric that stops improving, or by the global batch.

A schedule over steps is truncated when the batch grows: a cosine schedule planned for 132 steps of 64 examples ended at
44 % of its peak, because the run took only 80 steps. These policies count examples instead of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from adaptive.base.decision import Decision, Observation
from controllers._policy import Policy

Schedule = Callable[[float], Any]


def by_epochs(**schedules: Schedule) -> Policy:
    """Return a policy that sets hyperparameters by the number of epochs consumed, as a fraction.

        lr = ad.hyperparameter("lr", 0.1)
        ctrl.hook(ctrl.by_epochs(lr=optax.cosine_decay_schedule(0.1, decay_steps=30)))    # over 30 epochs

    Args:
      **schedules: per hyperparameter, a function of epochs, such as an optax schedule whose steps are epochs.

    Returns:
      A policy for a hook without values. It requests a change when a schedule's value differs from the one in force.

    Raises:
      ValueError: there is no schedule, or one is not a function.
    """
    return _scheduled("by_epochs", schedules, lambda seen: seen.epoch)


def by_examples(per_epoch: int, **schedules: Schedule) -> Policy:
    """Return a policy that sets hyperparameters by the number of examples consumed.

    Args:
      per_epoch: number of examples in the data set.
      **schedules: per hyperparameter, a function of examples consumed.

    Returns:
      A policy for a hook without values.

    Raises:
      ValueError: there is no schedule, or one is not a function.
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


def momentum_of_batch(hyperparameter: str, momentum: float, base: int) -> Policy:
    """Return a policy that adapts a momentum to the batch, so that its memory in examples stays constant.

        ctrl.hook(ctrl.momentum_of_batch("momentum", 0.9, base=64))

    A step with s times the batch replaces s steps. The fraction `momentum` of an old value that each of them keeps
    becomes momentum ** (batch / base) (Busbridge et al. 2023, "How to scale your EMA", for moving averages).

    Args:
      hyperparameter: its name.
      momentum: its value at the batch `base`; at least 0, below 1.
      base: a global batch.

    Returns:
      A policy for a hook without values.

    Raises:
      ValueError: an argument is out of range.
    """
    if not 0 <= momentum < 1 or base < 1:
        raise ValueError(f"momentum_of_batch: momentum is from 0 to 1, base 1 or more; got {momentum} and {base}.")

    def update(observation: Observation, state: tuple[()]) -> tuple[Decision | None, tuple[()]]:
        wanted = float(momentum ** (observation.global_batch / base))
        return _changes(observation, {hyperparameter: wanted}) if observation.due else None, state

    return Policy(lambda n_workers: (), update, "momentum_of_batch")


def _changes(observation: Observation, wanted: Mapping[str, Any]) -> Decision | None:
    """Return a decision on the values that differ from those in force, up to rounding; unknown names are included."""
    known = observation.hyperparameters
    changed = {name: v for name, v in wanted.items() if name not in known or not np.allclose(known[name], v, 1e-7, 0)}
    return Decision(hyperparameters=changed) if changed else None
