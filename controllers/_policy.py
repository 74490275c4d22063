"""`Policy`, a pair of pure functions like optax's gradient transformations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from adaptive.base.decision import Decision, Observation

PolicyState = Any  # a pytree of numpy arrays; its structure, shapes and dtypes never change
InitFn = Callable[[int], PolicyState]
CheckFn = Callable[[tuple[Any, ...], int, str], None]
UpdateFn = Callable[[Observation, PolicyState], tuple[Decision | None, PolicyState]]


class Policy(NamedTuple):
    """A rule that observes every step, and decides after every step at which its hook is due.

    A policy is pure: its memory is the state that it receives and returns. So programs checkpoint it, and simulations
    and replays run it without a cluster:

    >>> import adaptive as ad, controllers as ctrl
    >>> def update(observation, state):
    ...     return ad.Decision(global_batch=64 * 2 ** (observation.step // 100)), state
    >>> doubling = ctrl.Policy(init=lambda n_workers: (), update=update, name="doubling")

    Attributes:
      init: `init(n_workers) -> state`.
      update: `update(observation, state) -> (decision or None, new state)`. Also called for steps between due ones
        (`observation.due` is False), whose decisions are ignored. It must depend only on its arguments, so that all
        workers make the same decision, and must not modify `state`, because a failed step is repeated from it.
      name: the policy's name in reports and errors.
      reads: names of the hook's values, in order; used to find them in a recorded run.
      check: `check(values, n_workers, name)` raises an error if the policy cannot read the hook's values; called when a
        program is built, or a simulation or a replay begins. In a program the leaves of `values` are abstract: they
        have a `shape`, a `dtype` and `sources`, the names of the monitors from which they are computed.
      rests_until: `rests_until(state)` returns the number of the first step after which the policy can decide again.
        Steps before it are delivered later, together. For policies that take longer than short steps.
      why: `why(observation, state)` returns why the policy has just asked for nothing, for the report of the run.
    """

    init: InitFn
    update: UpdateFn
    name: str = "policy"
    reads: tuple[str, ...] = ()
    check: CheckFn = lambda values, n_workers, name: None
    rests_until: Callable[[PolicyState], int] = lambda state: 0
    why: Callable[[Observation, PolicyState], str] = lambda observation, state: ""


def stateless(decide: Callable[[Observation], Decision | None], name: str, **others: Any) -> Policy:
    """Return a policy without memory, which looks at due steps only. `others`: fields of `Policy`."""
    return Policy(lambda n_workers: (), lambda seen, state: (decide(seen) if seen.due else None, state), name, **others)
