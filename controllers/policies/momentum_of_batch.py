"""`momentum_of_batch`: a momentum that follows the global batch."""

from __future__ import annotations

from adaptive.base.decision import Decision, Observation
from controllers._policy import Policy

from .schedule import changed_values


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
        changed = changed_values(observation, {hyperparameter: wanted}) if observation.due else {}
        return Decision(hyperparameters=changed) if changed else None, state

    return Policy(lambda n_workers: (), update, "momentum_of_batch")
