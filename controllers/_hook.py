"""`hook`: passes values of the driver to a Python function or a policy, which can make requests."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from adaptive import CollectiveError, DriverError
from adaptive.base.decision import Decision, Observation
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.arrays import NotAnArrayError
from adaptive.base.values.numbers import whole
from adaptive.operators.hooks import hook as graph_hook

from ._control import Control
from ._policy import Policy


def hook(
    callback: Callable[..., Any] | Policy | None = None, *values: Any, every: int = 1, name: str | None = None
) -> None:
    """Call a Python function or a policy with values of the driver, after a step.

    The callback runs on every worker with the same values, and must make the same requests on every worker. So it must
    depend only on its arguments. Its requests take effect between this step and the next.

        def adapt_batch_size(control, noise):
            control.rescale(global_batch=noise.scale)

        def driver(state, batch):
            ...
            ctrl.hook(adapt_batch_size, noise, every=20)

    Args:
      callback: a function, called as `callback(control, *values)`, see `Control`; or a `Policy`, which observes every
        step and decides at every `every`-th. Values arrive as pytrees of numpy arrays and scalars.
      *values: pytrees of numbers; replicated.
      every: the callback runs after each step whose number is a multiple of `every`.
      name: the hook's name in reports and errors; by default the function's or the policy's name.

    Raises:
      CollectiveError: `callback` is not a function or a policy (`hook` is a call in the driver, and not a decorator),
        or does not take these values; a value is not a number; or `every` is not a positive integer.

    References:
      Mai et al. 2019, "Taming hyperparameters in deep learning systems", Listing 1.
    """
    where = at(current_line())
    if isinstance(callback, Policy):
        policy, name = callback, name or callback.name
    elif callable(callback):
        name = name or _name_of(callback)
        policy = _of_function(callback, values, name, where)
    else:
        raise CollectiveError(
            f"hook(){where}: expected a function or a policy, got {callback!r}. hook() is not a decorator. Call it "
            f"in the driver, with the function and its values:  ctrl.hook(adapt_batch_size, noise, every={every!r})"
        )
    number = whole(every)
    if number is None or number < 1:
        raise CollectiveError(f"hook {name!r}{where}: every= is a number of steps, 1 or more; got {every!r}.")
    handler = PolicyHandler(policy, name, where, every_step=policy is callback)
    try:
        graph_hook(name, handler, values, every=number, value_names=policy.reads)
    except (TypeError, NotAnArrayError) as error:
        raise CollectiveError(f"hook {name!r}{where}: values must be pytrees of numbers: {error}") from error


class PolicyHandler:
    """A policy behind a hook: see `Handler`. `every_step`: False for a function, whose requests are checked already."""

    def __init__(self, policy: Policy, name: str, where: str, *, every_step: bool = True) -> None:
        self._policy, self._name, self._where, self.every_step = policy, name, where, every_step
        self.init, self.rests_until, self.why = policy.init, policy.rests_until, policy.why

    def check(self, values: tuple[Any, ...], n_workers: int) -> None:
        """Check that the policy can read the values: see `Handler`. Raises a DriverError if it cannot."""
        try:
            self._policy.check(values, n_workers, self._policy.name)
        except (DriverError, ValueError) as error:
            raise DriverError(f"hook {self._name!r}{self._where}: {error}") from None

    def __call__(self, observation: Observation, state: Any) -> tuple[Decision | None, Any]:
        try:
            decision, state = self._policy.update(observation, state)
            if self.every_step:
                decision = self._checked(decision, observation) if observation.due else None
        except Exception as error:
            error.add_note(f"In hook {self._name!r}{self._where}, after step {observation.step}.")
            raise
        return decision, state

    def _checked(self, decision: Decision | None, observation: Observation) -> Decision | None:
        if decision is None:
            return None
        control = Control(observation, self._name, self._where)
        asked = decision.global_batch, decision.shares, decision.workers
        if any(part is not None for part in asked):
            control.rescale(*asked)
        if decision.hyperparameters:
            control.set_hyperparameters(**decision.hyperparameters)
        if decision.stop:
            control.stop()
        return control.close(decision.notes)


def _name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _of_function(fn: Callable[..., Any], values: tuple[Any, ...], name: str, where: str) -> Policy:
    """Return a policy whose decisions are a function's requests."""

    def update(observation: Observation, state: tuple[()]) -> tuple[Decision | None, tuple[()]]:
        control = Control(observation, name, where)
        fn(control, *observation.values)
        return control.close(), state

    return Policy(lambda n_workers: (), update, name, _names_of_values(fn, values, name, where))


def _names_of_values(fn: Callable[..., Any], values: tuple[Any, ...], name: str, where: str) -> tuple[str, ...]:
    """Return the names of the function's parameters for the values."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some built-in functions have none
        return ()
    try:
        signature.bind(None, *values)
    except TypeError as error:
        if getattr(fn, "__module__", "").partition(".")[0] == __name__.partition(".")[0]:
            raise CollectiveError(
                f"hook {name!r}{where}: {name} makes a policy. Call it:  ctrl.hook(ctrl.{name}(), …)"
            ) from error
        raise CollectiveError(
            f"hook {name!r}{where}: it will be called as {name}(control, *values) with {len(values)} values, but its "
            f"signature is {name}{signature}: {error}."
        ) from error
    named = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(named[1 : 1 + len(values)])
