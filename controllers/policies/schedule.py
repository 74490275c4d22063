"""`schedule`: the global batch and hyperparameters by steps, examples, tokens or epochs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from adaptive.base.decision import Decision, Observation
from adaptive.base.values.numbers import real, reals, truths, whole
from controllers._policy import Policy, stateless

Unit = Literal["steps", "examples", "tokens", "epochs"]
Schedule = Mapping[Any, Any] | Callable[[Any], Any]
_UNITS: dict[str, Unit] = {"step": "steps", "example": "examples", "token": "tokens", "epoch": "epochs"}
_POINT = re.compile(r"\s*([\d._]+(?:[eE]\+?\d+)?)\s*(?:(step|example|token|epoch)s?|(%))\s*")
_POINTS = '1000 (in the unit of by=), "5e6 examples", "10e9 tokens", "2 epochs", "500 steps" or "80%"'


def schedule(
    global_batch: Schedule | None = None,
    /,
    *,
    by: Unit = "steps",
    total: float | str | None = None,
    tokens_per_example: float | None = None,
    **hyperparameters: Schedule,
) -> Policy:
    """Return a policy that sets the global batch, and hyperparameters, at given points of the run.

        ctrl.hook(ctrl.schedule({0: 128, 1000: 256, 5000: 1024}))                        # steps
        ctrl.hook(ctrl.schedule({0: 256, "80%": 2048}, total="10e9 tokens", tokens_per_example=1024))
        ctrl.hook(ctrl.schedule(by="epochs", lr=optax.cosine_decay_schedule(0.1, 30)))   # over 30 epochs

    Examples are counted as they are consumed, so a schedule over examples, tokens or epochs holds for any batches, and
    after a restore. A value is in force from the step after the one that reaches its point; before the first step the
    program's `global_batch=` and initial hyperparameters hold. The policy makes a request when a value changes, and
    again if another hook has changed it.

    Args:
      global_batch: maps the points at which stages begin, in ascending order from 0 on, to their global batch, as
        above; or a function, such as an optax schedule. If points have several units, the last one reached holds.
      by: the unit of points that are numbers, and of the argument of functions: "steps" (completed ones), "examples",
        "tokens" or "epochs" (of data consumed, as a fraction). Give lengths above 2**31 to optax schedules as floats.
      total: the length of the run, of which points such as "80%" are parts: a point itself.
      tokens_per_example: tokens in one example, if they are counted: the length of a sequence.
      **hyperparameters: by name, the same for values of hyperparameters: numbers, booleans or arrays.

    Returns:
      A policy for a hook without values.

    Raises:
      ValueError: there is no schedule; one has no point 0, or points that do not ascend or cannot be counted, or values
        that are not batch sizes or finite numbers; or another argument is invalid.
    """
    if by not in get_args(Unit):
        raise ValueError(f"schedule: by= is one of {', '.join(map(repr, get_args(Unit)))}; got {by!r}.")
    if global_batch is None and not hyperparameters:
        raise ValueError('schedule: give a schedule, such as  schedule({0: 128, "2 epochs": 256})  or  schedule(lr=…).')
    if tokens_per_example is not None and not (real(tokens_per_example) or 0) > 0:
        raise ValueError(f"schedule: tokens_per_example= must be positive; got {tokens_per_example!r}.")
    counts = _Counts(by, tokens_per_example, None)
    if total is not None:
        counts = counts._replace(total=counts.point(total))
    of_batch = None if global_batch is None else counts.schedule("the global batch", global_batch, _check_batch)
    of_others = {name: counts.schedule(name, each, _check_value) for name, each in hyperparameters.items()}

    def decide(observation: Observation) -> Decision | None:
        # Values that are not finite and unknown names are refused by the request.
        batch = None if of_batch is None else of_batch(observation)
        if (number := real(batch)) is not None and np.isfinite(number):
            batch = None if round(number) == observation.global_batch else round(number)
        wanted = {name: np.asarray(value(observation)).tolist() for name, value in of_others.items()}
        known = observation.hyperparameters
        changed = {k: v for k, v in wanted.items() if k not in known or not _equal(known[k], v)}
        return Decision(global_batch=batch, hyperparameters=changed) if batch is not None or changed else None

    return stateless(decide, "schedule")


class _Point(NamedTuple):
    number: float
    unit: Unit


class _Counts(NamedTuple):
    """How the points of a run are counted: the arguments of `schedule`."""

    by: Unit
    tokens_per_example: float | None
    total: _Point | None

    def schedule(self, name: str, given: Schedule, check: Callable[[Any], str]) -> Callable[[Observation], Any]:
        """Return a schedule as a function of an observation; `check` returns why a value is invalid, or ""."""
        if callable(given):
            self._check_unit(self.by)
            return lambda seen: given(self._now(seen, self.by))
        if not isinstance(given, Mapping) or not given:
            raise ValueError(
                f"schedule: {name} is a mapping from points to values, such as  {{0: 128, 1000: 256}}, or a function; "
                f"got {given!r}."
            )
        stages = [(self.point(key), value) for key, value in given.items()]
        if stages[0][0].number != 0:
            raise ValueError(f"schedule: the first point of {name} must be 0; it is {next(iter(given))!r}.")
        for unit in {point.unit for point, _ in stages}:
            numbers = [point.number for point, _ in stages if point.unit == unit]
            if any(after <= before for before, after in pairwise(numbers)):
                raise ValueError(f"schedule: the points of {name} must ascend; got {list(given)}.")
        for key, value in given.items():
            if wrong := check(value):
                raise ValueError(f"schedule: {name} at {key!r} is {value!r}; {wrong}.")
        return lambda seen: [v for point, v in stages if self._now(seen, point.unit) >= point.number][-1]

    def point(self, key: Any) -> _Point:
        """Return a point as the user writes it, with its unit. Raises a ValueError if it is none."""
        match = _POINT.fullmatch(key) if isinstance(key, str) else None
        try:
            number = float(match[1]) if match else real(key)
        except ValueError:  # "1.2.3 steps"
            number = None
        if number is None or not 0 <= number < float("inf"):
            raise ValueError(f"schedule: {key!r} is not a point of a run. Write {_POINTS}.")
        if match and match[3]:
            if self.total is None:
                raise ValueError(f'schedule: for {key!r}, give the length of the run, such as  total="10e9 tokens".')
            return _Point(number / 100 * self.total.number, self.total.unit)
        unit = _UNITS[match[2]] if match else self.by
        self._check_unit(unit)
        return _Point(number, unit)

    def _check_unit(self, unit: Unit) -> None:
        if unit == "tokens" and self.tokens_per_example is None:
            raise ValueError("schedule: to count tokens, give the tokens of one example: tokens_per_example=1024.")

    def _now(self, seen: Observation, unit: Unit) -> float:
        """Return how far the run is. Counts of examples are floats: int32, of JAX, does not hold all of them."""
        if unit in ("steps", "epochs"):
            return seen.step if unit == "steps" else seen.epoch
        return float(seen.examples * (self.tokens_per_example if unit == "tokens" and self.tokens_per_example else 1))


def _check_batch(value: Any) -> str:
    return "" if (whole(value) or 0) >= 1 else "a global batch is a whole number, 1 or more"


def _check_value(value: Any) -> str:
    numbers = _numbers(value)
    known = numbers is not None and np.isfinite(numbers).all()
    return "" if known else "a hyperparameter is finite numbers, or booleans"


def _numbers(value: Any) -> np.ndarray | None:
    numbers = reals(value)
    return truths(value) if numbers is None else numbers


def _equal(present: Any, value: Any) -> bool:
    """Return whether a hyperparameter has a value; False for one that it cannot have, which the request refuses."""
    numbers = _numbers(value)
    return numbers is not None and numbers.shape == np.shape(present) and np.allclose(present, numbers, 1e-7, 0)
