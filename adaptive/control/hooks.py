"""The hooks of a program, after a step: which of them are due, what they are shown, and what all of them ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.decision import Decision, Observation
from adaptive.graph.plan import HookPlan

from .batch_sizes import BatchSizes


class _Seen(NamedTuple):
    """A step's values, not yet shown to a policy: still on the device, so that nobody waited for them."""

    step: int
    epoch: float
    leaves: list[jax.Array]
    batch_sizes: tuple[int, ...]
    previous: tuple[int, ...]


class Hooks:
    """The hooks of a program, and their states."""

    def __init__(self, hooks: Sequence[HookPlan], n_workers: int):
        self.hooks = [h.hook for h in hooks]
        self.n_workers = n_workers
        self.first_states = self.begun()  # of which later ones keep structure, shapes and dtypes
        self.states = list(self.first_states)
        self.names = [f"{i}/{hook.name}" for i, hook in enumerate(self.hooks)]
        self._seen: list[list[_Seen]] = [[] for _ in hooks]

    def run(
        self,
        step: int,
        epoch: float,
        values: Sequence[list[jax.Array]],
        ran: tuple[tuple[int, ...], tuple[int, ...]],
        sizes: BatchSizes,
    ) -> tuple[Decision | None, list[str]]:
        """Show this step to the hooks; at due steps, merge what they ask for.

        Args:
          values: the leaves that each hook is given.
          ran: the batch sizes of this step and of the one before it.
          sizes: what holds for the next.

        Returns:
          The decision of all, or `None`; and the names of the hooks behind it, or, where none asked for anything, of
          those that were due.
        """
        merged = Decision()
        asked: list[str] = []
        silent: list[str] = []
        for i, hook in enumerate(self.hooks):
            due = step % hook.every == 0
            if due or hook.handler.every_step:
                self._seen[i].append(_Seen(step, epoch, values[i], *ran))
            if not due:
                continue
            decision = self._show(i, sizes, merged.global_batch)
            if decision is not None:
                merged = merge(merged, decision)
            (asked if decision else silent).append(hook.name)
        return (merged if merged or merged.notes else None), asked or silent

    def catch_up(self, sizes: BatchSizes) -> None:
        """Show the hooks all steps that were kept for their next turn, so that their states hold what is known."""
        for i in range(len(self.hooks)):
            self._show(i, sizes, None, due=False)

    def begun(self) -> list[Any]:
        """States in which the hooks have seen nothing yet."""
        return [h.handler.init(self.n_workers) for h in self.hooks]

    def restart(self, states: Sequence[Any]) -> None:
        """Go on from these states. The steps that were kept for the hooks' next turn are dropped."""
        self.states = list(states)
        self._seen = [[] for _ in self.hooks]

    def _show(self, i: int, sizes: BatchSizes, global_batch: int | None, *, due: bool = True) -> Decision | None:
        hook, decision = self.hooks[i], None
        wanted = sizes.limits.nearest(sum(sizes.target) if global_batch is None else global_batch)
        seen, self._seen[i] = self._seen[i], []
        for number, step in enumerate(seen, 1):
            values = jax.tree.unflatten(hook.tree, [np.asarray(leaf)[()] for leaf in step.leaves])
            observation = Observation(
                step.step,
                step.epoch,
                values,
                step.batch_sizes,
                step.previous,
                wanted,
                sizes.limits,
                due=due and number == len(seen),
            )
            decision, self.states[i] = hook.handler(observation, self.states[i])
        return decision


def merge(first: Decision, then: Decision) -> Decision:
    """Two hooks' requests after one step: the later overrides, where it asks for anything."""
    return Decision(
        then.global_batch if then.global_batch is not None else first.global_batch,
        then.shares if then.shares is not None else first.shares,
        first.stop or then.stop,
        (*first.notes, *then.notes),
    )
