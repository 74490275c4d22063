"""`seesaw`: a batch that grows where a schedule would lower the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from math import floor, isfinite, log
from typing import Any, Literal, NamedTuple

import numpy as np

from adaptive.base.decision import Decision, Observation
from adaptive.base.values.numbers import real
from controllers._policy import Policy

Rule = Literal["sqrt", "linear"]
_GROWTH = {"sqrt": 1.0, "linear": 2 / 3}  # the batch grows by the decay to this power


class SeesawState(NamedTuple):
    """State of `seesaw`. A pytree."""

    peak: Any  # float64: the largest value of the schedule so far


def seesaw(
    *,
    base: int,
    max_batch: int,
    factor: float = 2.0,
    rule: Rule = "sqrt",
    **schedule: Callable[[float], Any],
) -> Policy:
    """Return a policy that grows the global batch while a learning-rate schedule decays, to take fewer steps.

        lr = ad.hyperparameter("lr", 3e-4)
        tx = optax.chain(optax.adam(lr), ctrl.scale_by_batch("sqrt", base=64))
        cosine = optax.cosine_decay_schedule(3e-4, decay_steps=30 * n)    # in examples
        ctrl.hook(ctrl.published.seesaw(base=64, max_batch=1024, lr=cosine), every=10)

    Sets the hyperparameter to the schedule's value at the examples consumed, as `schedule` does. Sets the global
    batch to `base * factor**k`, where `factor**k` is the largest power not above the decay `d`, the schedule's peak so
    far over its present value (`d**(2/3)` for "linear"). In the driver, `scale_by_batch` with the same rule and base
    scales updates with the batch. The ratio of learning rate and noise is then that of the schedule at all times: when
    the batch grows, the learning rate rises by a smaller factor, and then declines with the schedule.

    Without `max_batch` and with a factor close to 1, `optax.cosine_decay_schedule` takes half as many steps, and 62 %
    with a factor of 2; a quarter of a cosine, as in the paper, 64 % (2 / pi). Once the batch is `max_batch`, only the
    learning rate decays. Noise must dominate the updates from `base` on, so choose a base near the critical batch.

    Args:
      base: the global batch for which the schedule was chosen.
      max_batch: the largest global batch.
      factor: the batch grows in steps of this factor, above 1.
      rule: the rule of `scale_by_batch` in the driver: "sqrt" for Adam and similar optimizers, "linear" for SGD.
      **schedule: exactly one function of examples consumed, under the hyperparameter's name.

    Returns:
      A policy for a hook without values.

    Raises:
      ValueError: not exactly one schedule, or another argument is out of range.

    References:
      Meterez et al. 2025, "Seesaw: accelerating training by balancing learning rate and batch size scheduling"
      (arXiv 2510.14717).
    """
    if len(schedule) != 1 or not all(map(callable, schedule.values())):
        raise ValueError(
            "seesaw: give one schedule, such as  seesaw(base=64, max_batch=1024, lr=cosine), a function of the "
            f"examples consumed; got {schedule}."
        )
    if rule not in _GROWTH:
        raise ValueError(f"seesaw: rule must be one of {', '.join(map(repr, _GROWTH))}; got {rule!r}.")
    if base < 1 or max_batch < base or not factor > 1:
        raise ValueError(
            "seesaw: base must be at least 1, max_batch at least base and factor above 1; got "
            f"{base}, {max_batch} and {factor}."
        )
    ((name, at),) = schedule.items()

    def init(n_workers: int) -> SeesawState:
        del n_workers
        return SeesawState(np.asarray(0.0))

    def update(observation: Observation, state: SeesawState) -> tuple[Decision | None, SeesawState]:
        if not observation.due:
            return None, state
        value = real(np.asarray(at(float(observation.examples)))[()])
        if value is None or not isfinite(value) or value < 0:
            raise ValueError(
                f"seesaw: the schedule of {name} is {value!r} after {observation.examples:,} examples; a learning "
                "rate is finite and not negative."
            )
        peak = max(float(state.peak), value)
        grown = _batch(peak / value if value else float("inf"))
        batch = None if grown == observation.global_batch else grown
        known = observation.hyperparameters.get(name)
        changed = {} if known is not None and np.allclose(known, value, 1e-7, 0) else {name: value}
        decision = Decision(global_batch=batch, hyperparameters=changed) if changed or batch else None
        return decision, SeesawState(np.asarray(peak))

    def _batch(decay: float) -> int:
        if decay == float("inf"):
            return max_batch
        steps = floor(_GROWTH[rule] * log(decay) / log(factor) + 1e-9)  # a decay of exactly `factor` is a step
        return min(round(base * factor**steps), max_batch) if steps < log(max_batch, factor) + 1 else max_batch

    return Policy(init, update, "seesaw")
