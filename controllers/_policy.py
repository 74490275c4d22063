"""What a policy is: a pair of pure functions, as a gradient transformation is in optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from adaptive.extend import Decision, Observation

PolicyState = Any  # a pytree of numpy arrays; its structure, shapes and dtypes never change
InitFn = Callable[[int], PolicyState]
CheckFn = Callable[[tuple[Any, ...], int, str], None]
UpdateFn = Callable[[Observation, PolicyState], tuple[Decision | None, PolicyState]]


class Policy(NamedTuple):
    """A rule that looks at every step and decides at the due ones.

    A policy owns nothing: what it remembers is the state that it is handed and hands back, so the program can
    checkpoint it, and a test, a simulation or a replay can run it without a cluster:

    >>> import controllers as ctrl
    >>> def update(observation, state):
    ...     return ctrl.Decision(global_batch=64 * 2 ** (observation.step // 100)), state
    >>> doubling = ctrl.Policy(init=lambda n_workers: (), update=update, name="doubling")

    Attributes:
      init: `init(n_workers) -> state`.
      update: `update(observation, state) -> (decision or None, new state)`. It is shown the steps between due ones
        too (`observation.due` is False there); what it then decides is not applied. It must depend on nothing but
        its arguments, so that all workers decide alike, and must not write into the state that it is given: a step
        that fails is taken again from that state.
      name: what reports and errors call it.
      reads: what the values are called that its hook is given, in their order; by these names they are found in a
        recorded run.
      check: `check(values, n_workers, name)`, called when a program is built: it raises where the hook is given what
        the policy cannot read, and says what to write instead. Of the values only that is known which is in the graph:
        each leaf has a `shape`, a `dtype` and `sources`, the names of what was measured that it is made of.
      rests_until: `rests_until(state)` returns the number of the first step after which the policy can decide anything
        again. Due steps before that one are shown to it later, together with the next due one. A policy that costs more
        than short steps take rests between two decisions; by default none does.
    """

    init: InitFn
    update: UpdateFn
    name: str = "policy"
    reads: tuple[str, ...] = ()
    check: CheckFn | None = None
    rests_until: Callable[[PolicyState], int] | None = None
