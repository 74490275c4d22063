"""`schedule`: a predefined global batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from adaptive.base.decision import Decision, Observation
from adaptive.base.numbers import real
from controllers._policy import Policy


def schedule(batches: Mapping[float, int] | Callable[[Any], Any], *, by: Literal["step", "epoch"] = "step") -> Policy:
    """Return a policy that sets the global batch by step or epoch.

        ctrl.hook(ctrl.schedule({0: 128, 1000: 256, 5000: 1024}))

    The policy makes a request when the schedule's value changes, and again if another hook has changed the batch.

    Args:
      batches: maps the first step of each stage to its global batch, as above; or a function of the step, such as an
        optax schedule.
      by: the argument of the schedule: "step", completed steps, or "epoch", epochs of data consumed, as a fraction.

    Returns:
      A policy for a hook without values.

    Raises:
      ValueError: `by` is something else.
    """
    if by not in ("step", "epoch"):
        raise ValueError(f"schedule: by= is 'step' or 'epoch', got {by!r}.")
    of = _stairs(batches) if isinstance(batches, Mapping) else batches

    def update(observation: Observation, state: tuple[()]) -> tuple[Decision | None, tuple[()]]:
        batch = of(observation.step if by == "step" else observation.epoch)
        number = real(batch)
        if number is not None and np.isfinite(number):  # other values are refused by the request
            batch = round(number)
        if not observation.due or batch == observation.global_batch:
            return None, state
        return Decision(global_batch=batch), state

    return Policy(lambda n_workers: (), update, "schedule")


def _stairs(batches: Mapping[float, int]) -> Callable[[float], int]:
    starts = sorted(batches)
    if not starts or starts[0] > 0:
        raise ValueError(f"schedule: the first entry must be for 0; it is {starts[:1] or 'missing'}.")
    return lambda at: batches[starts[bisect_right(starts, at) - 1]]
