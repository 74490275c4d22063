"""Runs the hooks of a program after a step: selects those that are due, passes observations, merges requests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.decision import Decision, Observation
from adaptive.graph.plan import HookPlan

from .batch_sizes import BatchSizes
from .hyperparameters import NONE, Hyperparameters
from .membership import Membership
from .requests import Request
from .slot_reset import reset_slots

_NOTHING = Decision()
_NEVER = sys.maxsize + 1  # a step number that is never reached


class TakenStep(NamedTuple):
    """A step as hooks observe it. Replicated."""

    step: int
    epoch: float
    ran: tuple[tuple[int, ...], tuple[int, ...]]  # the batch sizes of this step and of the one before it
    members: tuple[int, ...]
    examples: int = 0  # consumed so far, those of this step included


class HookOutcome(NamedTuple):
    """The requests of hooks after a step. Replicated."""

    decision: Decision | None = None  # all requests, merged
    names: Sequence[str] = ()  # of the hooks with a request; if none has one, of the hooks that were due
    requests: tuple[Request, ...] = ()  # of each hook that has one, in the order of the driver


class Hooks:
    """The hooks of a program, and their states.

    Args:
      n_workers: number of worker slots.
      keep_sizes: whether what policies request for batch sizes and workers is ignored.

    Attributes:
      next_due: no hook decides after a step with a lower number than this. Replicated, except that it is 0 from
        `restart` until the next call of `run`.
      watches: whether a hook also observes the steps between decisions. If not, steps before `next_due` need no call.
      why: for each hook, why it asked for nothing when it was due last; "" if it asked for something, or does not say.
    """

    TRANSFERRED = ("states", "joined")  # what a joining process takes over from the others, before `restart`

    def __init__(
        self,
        hooks: Sequence[HookPlan],
        n_workers: int,
        membership: Membership,
        hyperparameters: Hyperparameters = NONE,
        *,
        keep_sizes: bool = False,
    ):
        self._keep_sizes = keep_sizes
        self._membership, self._hyperparameters = membership, hyperparameters
        self.hooks = [h.hook for h in hooks]
        self.n_workers = n_workers
        self.first_states = self.begun()  # later states keep their structure, shapes and dtypes
        self.states = list(self.first_states)
        self.names = [f"{i}/{hook.name}" for i, hook in enumerate(self.hooks)]
        self.why = [""] * len(hooks)
        # Steps that a hook has not observed yet, with its values, which may still be computed on the device.
        self._seen: list[list[tuple[TakenStep, list[jax.Array]]]] = [[] for _ in hooks]
        self.joined: list[set[int]] = [set() for _ in hooks]  # slots with a new worker since the last observation
        self._all_watching = [i for i, hook in enumerate(self.hooks) if hook.handler.every_step]
        self._watching, self.watches = self._all_watching, bool(self._all_watching)
        # Each returns the number of the first step after which a hook in a given state can decide.
        self._rests_until = [getattr(hook.handler, "rests_until", lambda state: 0) for hook in self.hooks]
        self._rest_until = [0] * len(hooks)
        self.next_due = self._due_after(0)

    @property
    def suspended(self) -> bool:
        """Whether hooks neither run nor observe steps."""
        return self.next_due == _NEVER

    @suspended.setter
    def suspended(self, suspended: bool) -> None:
        self._watching = [] if suspended else self._all_watching
        self.watches, self.next_due = bool(self._watching), _NEVER if suspended else 0

    def _due_after(self, step: int) -> int:
        after = [max(step + 1, rest) for rest in self._rest_until]
        return min(
            [-(-n // hook.every) * hook.every for n, hook in zip(after, self.hooks, strict=True)], default=sys.maxsize
        )

    def note(self, taken: TakenStep, values: Sequence[list[jax.Array]]) -> None:
        """Keep a step before `next_due` for the hooks that observe every step. Does not block, makes no decision."""
        for i in self._watching:
            self._seen[i].append((taken, values[i]))

    def run(self, taken: TakenStep, values: Sequence[list[jax.Array]], sizes: BatchSizes) -> HookOutcome:
        """Pass this step to the hooks that are due or observe every step, and merge their requests.

        Args:
          values: the leaves of each hook's values.
          sizes: the batch sizes of the next step.
        """
        self.note(taken, values)
        step = taken.step
        if step < self.next_due:
            return HookOutcome()
        merged, requests, silent = _NOTHING, list[Request](), list[str]()
        rests = self._rest_until
        deciding = [i for i, hook in enumerate(self.hooks) if step % hook.every == 0 and step >= rests[i]]
        for i in deciding:
            hook = self.hooks[i]
            if not hook.handler.every_step:
                self._seen[i].append((taken, values[i]))
            decision = self._show(i, sizes, merged)
            if decision is not None and self._keep_sizes and hook.handler.every_step:
                decision = replace(decision, global_batch=None, shares=None, workers=None, notes=())
            if decision is not None:
                merged = merge(merged, decision)
            if decision:
                requests.append(Request(hook.name, step, decision))
            else:
                silent.append(hook.name)
            self._rest_until[i] = self._rests_until[i](self.states[i])
        self.next_due = self._due_after(step)
        if not deciding:
            return HookOutcome()
        names = [request.by for request in requests] or silent
        return HookOutcome(merged if merged or merged.notes else None, names, tuple(requests))

    def catch_up(self, sizes: BatchSizes) -> None:
        """Pass all kept steps to the hooks, so that their states are up to date."""
        for i in range(len(self.hooks)):
            self._show(i, sizes, _NOTHING, due=False)

    def change_members(self, joined: Sequence[int], sizes: BatchSizes) -> None:
        """Reset the hooks' states for the worker slots that have a new worker."""
        if not joined:
            return
        self.catch_up(sizes)
        for i, hook in enumerate(self.hooks):
            self.states[i] = reset_slots(self.states[i], hook.handler.init, self.n_workers, joined)
            self.joined[i].update(joined)

    def begun(self) -> list[Any]:
        """Return the initial states of the hooks."""
        return [h.handler.init(self.n_workers) for h in self.hooks]

    def restart(self, states: Sequence[Any]) -> None:
        """Restore these states. Drops all kept steps."""
        self.states = list(states)
        self._seen = [[] for _ in self.hooks]
        self._rest_until = [rests(state) for rests, state in zip(self._rests_until, states, strict=True)]
        self.next_due = 0  # the next step may have a lower number than the last one

    def go_back(self, step: int) -> None:
        """Drop the kept steps after this one, because they are taken again."""
        for seen in self._seen:
            while seen and seen[-1][0].step > step:
                seen.pop()

    def _show(self, i: int, sizes: BatchSizes, asked: Decision, *, due: bool = True) -> Decision | None:
        """Pass the last step to hook `i`, with the merged requests of earlier hooks, and return its decision."""
        seen, self._seen[i] = self._seen[i], []
        if not seen:
            return None
        hook, handler, state, decision = self.hooks[i], self.hooks[i].handler, self.states[i], None
        bounds = sizes.bounds(None if asked.shares is None else sizes.checked(asked.shares))
        wanted = bounds.nearest(sum(sizes.target) if asked.global_batch is None else asked.global_batch)
        numbers = self._membership.numbers
        if asked.workers is not None:
            numbers = numbers._replace(target=self._membership.nearest(asked.workers))
        types, values_so_far = self._hyperparameters.types, {**self._hyperparameters.values, **asked.hyperparameters}
        joined, self.joined[i] = tuple(sorted(self.joined[i])), set()
        for number, (taken, values) in enumerate(seen, 1):
            shown = hook.tree.unflatten([np.asarray(leaf)[()] for leaf in values])
            decides = due and number == len(seen)
            observation = Observation(
                *(taken.step, taken.epoch, shown, *taken.ran, wanted, bounds, decides, taken.members, joined),
                *(*numbers, values_so_far, types, taken.examples),
            )
            decision, state = handler(observation, state)
            self.states[i], joined = state, ()
            if decides:
                explain = getattr(handler, "why", None)
                self.why[i] = explain(observation, state) if explain is not None and not decision else ""
        return decision


def merge(first: Decision, then: Decision) -> Decision:
    """Merge two hooks' requests after one step: where both set a field, the later one holds."""
    return Decision(
        then.global_batch if then.global_batch is not None else first.global_batch,
        then.shares if then.shares is not None else first.shares,
        first.stop or then.stop,
        (*first.notes, *then.notes),
        then.workers if then.workers is not None else first.workers,
        {**first.hyperparameters, **then.hyperparameters},
    )
