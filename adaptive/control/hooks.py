"""What happens between two steps: hooks run, their requests become new sizes, and sizes wait until all can make
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.decision import Decision, Limits, Observation
from adaptive.base.errors import BatchSizeError
from adaptive.base.numbers import brief, whole
from adaptive.graph.plan import HookPlan

from .sizes import check_shares, split


class Sizes:
    """The split in force, and the one that was asked for.

    A decision takes effect at the first step for which every worker has kernels to make its new size. Until then it is
    pending, and the old split goes on. A later decision takes its place; but where every size has to be compiled
    (`one_by_one`), it waits behind it, or a driver that asks for another size in every step would never get any.
    """

    one_by_one = False
    resizable = True

    def __init__(self, global_batch: int, shares: Sequence[float], limits: Limits, examples: int):
        self.examples = examples
        self.limits = limits
        self.shares = tuple(float(s) for s in check_shares(shares, len(limits.lower)))
        self.current = split(self.check_global(global_batch), self.shares, limits)
        self.previous = self.current
        self.pending: tuple[int, ...] | None = None
        self.next: tuple[int, ...] | None = None  # behind the pending one

    @property
    def target(self) -> tuple[int, ...]:
        """The split that was asked for last."""
        return self.next or self.pending or self.current

    @property
    def most(self) -> int:
        """The largest global batch."""
        most = min(self.examples, sum(self.limits.upper))
        return most - most % self.limits.multiple

    def nearest(self, global_batch: float) -> int:
        """The global batch that can be, nearest to one that is asked for."""
        unit = self.limits.multiple
        rounded = (int(global_batch) + unit // 2) // unit * unit
        return min(max(rounded, sum(self.limits.lower)), self.most)

    def check_global(self, global_batch: Any) -> int:
        """A valid global batch, or an error that says why it is none."""
        n = len(self.limits.lower)
        number = whole(global_batch)
        if number is None:
            raise BatchSizeError(f"global_batch must be a whole number of examples; got {global_batch!r}.")
        if number < sum(self.limits.lower):
            raise BatchSizeError(
                f"global_batch={brief(number)} is too small for {n} workers: each takes at least "
                f"{_examples(self.limits.multiple)} in a step."
                if number > 0
                else f"global_batch must be positive; got {brief(number)}."
            )
        if number > self.examples:
            raise BatchSizeError(
                f"global_batch={brief(number)} is larger than the data set, which has {self.examples} examples."
            )
        unit = self.limits.multiple
        if number % unit:
            below = number // unit * unit
            raise BatchSizeError(
                f"global_batch={number} is no multiple of {unit}, the minibatches that the driver cuts every "
                f"local batch into. The nearest are {below} and {below + unit}."
            )
        if number > self.most:
            raise BatchSizeError(
                f"global_batch={number} is more than the {n} workers may take together: {sum(self.limits.upper)}."
            )
        return number

    def ask(self, decision: Decision, who: str = "rescale") -> list[str]:
        """Make a decision's sizes pending. Returns notes on what was clipped.

        Args:
          who: asks for it, in words.

        Raises:
          BatchSizeError: the sizes stay as they are.
        """
        notes, wanted, shares = [], sum(self.target), self.shares
        if decision.global_batch is not None:
            wanted = self.nearest(decision.global_batch)
            if wanted != decision.global_batch:
                notes.append(f"global batch {decision.global_batch} {self._changed_to(wanted)}.")
        if decision.shares is not None:
            shares = tuple(float(s) for s in check_shares(decision.shares, len(self.limits.lower)))
        elif wanted == sum(self.target):
            return notes  # nothing new, so the split stays as it is, to the last example
        sizes = split(wanted, shares, self.limits)
        if not self.resizable and sizes != self.current:
            raise BatchSizeError(
                f"{who} asked for batch sizes {sizes}, but this program's stay as they are, {self.current}: it was "
                "made with resizable=False. Leave that out of ad.Program(...) where sizes are to change."
            )
        self.shares = shares
        if self.one_by_one and self.pending is not None and sizes != self.current:
            self.next = None if sizes == self.pending else sizes
        else:
            self.pending, self.next = None if sizes == self.current else sizes, None
        return notes

    def _changed_to(self, wanted: int) -> str:
        if wanted == self.most:
            by_data = self.examples < sum(self.limits.upper)
            return f"clipped to {wanted}, {'the size of the data set' if by_data else 'the most that workers may hold'}"
        if wanted == sum(self.limits.lower):
            return f"clipped to {wanted}, the least for {len(self.limits.lower)} workers"
        return f"rounded to {wanted}, a multiple of {self.limits.multiple}"

    def step_done(self, *, apply: bool) -> None:
        """A step has run with the current sizes; the next one may have the pending ones."""
        self.previous = self.current
        if apply:
            self.apply()

    def restart(self, sizes: Sequence[int], shares: Sequence[float]) -> None:
        """Take up a split that was in force before, and the shares that it was made by. Both must be valid."""
        self.shares = tuple(shares)
        self.current = self.previous = tuple(sizes)
        self.pending = self.next = None

    def apply(self) -> None:
        """Take up the pending split."""
        if self.pending is not None:
            self.current, self.pending, self.next = self.pending, self.next, None


def _examples(number: int) -> str:
    return "one example" if number == 1 else f"{number} examples"


class _Seen(NamedTuple):
    """A step's values, not yet shown to a policy: still on the device, so that nobody waited for them."""

    step: int
    epoch: float
    leaves: list[jax.Array]
    batch_sizes: tuple[int, ...]
    previous: tuple[int, ...]


class Barrier:
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
        sizes: Sizes,
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

    def catch_up(self, sizes: Sizes) -> None:
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

    def _show(self, i: int, sizes: Sizes, global_batch: int | None, *, due: bool = True) -> Decision | None:
        hook, decision = self.hooks[i], None
        wanted = sizes.nearest(sum(sizes.target) if global_batch is None else global_batch)
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
    """Two hooks' requests at one barrier: the later overrides, where it asks for anything."""
    return Decision(
        then.global_batch if then.global_batch is not None else first.global_batch,
        then.shares if then.shares is not None else first.shares,
        first.stop or then.stop,
        (*first.notes, *then.notes),
    )
