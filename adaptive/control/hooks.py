"""What happens between two steps: hooks run, their requests become new sizes, and sizes wait until all can make
them. Where others sit on the seats, batches are split anew at once.
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

from .newcomers import begun_anew
from .sizes import check_shares, split


class Sizes:
    """The split in force, and the one that was asked for.

    A decision takes effect at the first step for which every worker has kernels to make its new size. Until then it is
    pending, and the old split goes on. A later decision takes its place; but where every size has to be compiled
    (`one_by_one`), it waits behind it, or a driver that asks for another size in every step would never get any.

    A worker takes part if there is one on its seat and its share is not 0. When others come to take part the global
    batch stays, or comes as near to what was asked for last as their limits let it.

    Args:
      limits: of every seat, were there a worker on it that takes part.
      examples: in the data set.
      members: the seats with a worker on them; all by default.

    Attributes:
      shares: as they were asked for last; 0 for empty seats.
    """

    one_by_one = False
    needed: tuple[int, ...] = ()  # workers that must take examples

    def __init__(
        self,
        global_batch: int,
        shares: Sequence[float],
        limits: Limits,
        examples: int,
        members: Sequence[int] | None = None,
    ):
        self.examples = examples
        self.limits = limits
        self.members = tuple(range(len(limits.lower)) if members is None else members)
        self.shares = self.checked(shares)
        self.wanted = self.check_global(global_batch)
        self.current = split(self.wanted, self.shares, limits)
        self.previous = self.current
        self.pending: tuple[int, ...] | None = None
        self.next: tuple[int, ...] | None = None  # behind the pending one

    @property
    def target(self) -> tuple[int, ...]:
        """The split that was asked for last."""
        return self.next or self.pending or self.current

    def bounds(self, shares: Sequence[float] | None = None) -> Limits:
        """The limits of those who take part: with the shares that were asked for last, or with others."""
        return self.limits.of([share > 0 for share in (self.shares if shares is None else shares)])

    def checked(self, shares: Any) -> tuple[float, ...]:
        """Valid shares, 0 for empty seats; or an error that says why they are none."""
        weights = check_shares(shares, len(self.limits.lower)).tolist()
        taken = tuple(w if seat in self.members else 0.0 for seat, w in enumerate(weights))
        if not any(taken):
            seats = ", ".join(str(seat) for seat, w in enumerate(weights) if w)
            raise BatchSizeError(f"shares give examples to seat {seats} alone, and nobody sits there.")
        missing = [seat for seat in self.needed if not taken[seat]]
        if missing:
            raise BatchSizeError(
                f"worker {missing[0]} must take examples, at least a few: the driver broadcasts what that worker has."
            )
        return taken

    @property
    def most(self) -> int:
        """The largest global batch of those who take part."""
        return self._most(self.bounds())

    def _most(self, bounds: Limits) -> int:
        most = min(self.examples, sum(bounds.upper))
        return most - most % bounds.multiple

    def nearest(self, global_batch: float, bounds: Limits | None = None) -> int:
        """The global batch that can be, nearest to one that is asked for."""
        bounds = bounds or self.bounds()
        unit = bounds.multiple
        rounded = (int(global_batch) + unit // 2) // unit * unit
        return min(max(rounded, sum(bounds.lower)), self._most(bounds))

    def check_global(self, global_batch: Any, shares: Sequence[float] | None = None) -> int:
        """A valid global batch, with these shares or the present ones, or an error that says why it is none."""
        bounds = self.bounds(shares)
        n = len(bounds.active)
        number = whole(global_batch)
        if number is None:
            raise BatchSizeError(f"global_batch must be a whole number of examples; got {global_batch!r}.")
        if number < sum(bounds.lower):
            raise BatchSizeError(
                f"global_batch={brief(number)} is too small for {n} workers: each takes at least "
                f"{_examples(bounds.multiple)} in a step, but for those whose share is 0."
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
        if number > self._most(bounds):
            raise BatchSizeError(
                f"global_batch={number} is more than the {n} workers may take together: {sum(bounds.upper)}."
            )
        return number

    def ask(self, decision: Decision) -> list[str]:
        """Make a decision's sizes pending. Returns notes on what was clipped."""
        shares = self.shares if decision.shares is None else self.checked(decision.shares)
        bounds, before = self.bounds(shares), sum(self.target)
        asked = self.wanted if decision.global_batch is None else decision.global_batch
        total, notes = self._clipped(asked, bounds, quiet=before if decision.global_batch is None else None)
        if decision.global_batch is not None:
            self.wanted = total
        if decision.shares is None and total == before:
            return notes  # nothing new, so the split stays as it is, to the last example
        self.shares = shares
        sizes = split(total, shares, self.limits)
        if self.one_by_one and self.pending is not None and sizes != self.current:
            self.next = None if sizes == self.pending else sizes
        else:
            self.pending, self.next = None if sizes == self.current else sizes, None
        return notes

    def seat(self, members: Sequence[int], joined: Sequence[int]) -> list[str]:
        """Others sit on the seats from now on: split anew, at once. Returns notes on it.

        Args:
          joined: seats with another worker than before. Nothing is known of its speed: it begins with the mean share of
            those who stay.
        """
        left = [seat for seat in self.members if seat not in members]
        notes = [f"seat {seat} is empty: its worker has left." for seat in left]
        notes += [f"a worker has joined on seat {seat}." for seat in joined]
        stay = [self.shares[seat] for seat in members if seat not in joined and self.shares[seat] > 0]
        first = sum(stay) / len(stay) if stay else 1.0
        shares = [first if seat in joined else share for seat, share in enumerate(self.shares)]
        self.members = tuple(members)
        if not any(shares[seat] for seat in members):  # those who took examples have all left
            shares = [1.0] * len(shares)
        self.shares = self.checked(shares)
        total, clipped = self._clipped(self.wanted, self.bounds(), quiet=sum(self.current))
        self.current, self.pending, self.next = split(total, self.shares, self.limits), None, None
        return notes + clipped

    def _clipped(self, asked: int, bounds: Limits, *, quiet: int | None) -> tuple[int, list[str]]:
        """The global batch that can be, and a note where it is another, and not the `quiet` one, known already."""
        total = self.nearest(asked, bounds)
        if total in (asked, quiet):
            return total, []
        return total, [f"global batch {asked} {self._changed_to(total, bounds)}."]

    def _changed_to(self, total: int, bounds: Limits) -> str:
        if total == self._most(bounds):
            by_data = self.examples < sum(bounds.upper)
            return f"clipped to {total}, {'the size of the data set' if by_data else 'the most that workers may hold'}"
        if total == sum(bounds.lower):
            return f"clipped to {total}, the least for {len(bounds.active)} workers"
        return f"rounded to {total}, a multiple of {bounds.multiple}"

    def step_done(self, *, apply: bool) -> None:
        """A step has run with the current sizes; the next one may have the pending ones."""
        self.previous = self.current
        if apply:
            self.apply()

    def restart(self, sizes: Sequence[int], shares: Sequence[float], members: Sequence[int] | None = None) -> None:
        """Take up a split that was in force before, the shares that it was made by, and who was there, if others were
        than now. All must be valid.
        """
        self.members = self.members if members is None else tuple(members)
        self.shares, self.wanted = tuple(shares), sum(sizes)
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
    members: tuple[int, ...]
    joined: tuple[int, ...]


class Barrier:
    """The hooks of a program, and their states."""

    def __init__(self, hooks: Sequence[HookPlan], n_workers: int):
        self.hooks = [h.hook for h in hooks]
        self.n_workers = n_workers
        self.first_states = self.begun()  # of which later ones keep structure, shapes and dtypes
        self.states = list(self.first_states)
        self.names = [f"{i}/{hook.name}" for i, hook in enumerate(self.hooks)]
        self._seen: list[list[_Seen]] = [[] for _ in hooks]
        self._joined: list[set[int]] = [set() for _ in hooks]  # seats, since the last step that was shown

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
                joined, self._joined[i] = tuple(sorted(self._joined[i])), set()
                self._seen[i].append(_Seen(step, epoch, values[i], *ran, sizes.members, joined))
            if not due:
                continue
            decision = self._show(i, sizes, merged)
            if decision is not None:
                merged = merge(merged, decision)
            (asked if decision else silent).append(hook.name)
        return (merged if merged or merged.notes else None), asked or silent

    def catch_up(self, sizes: Sizes) -> None:
        """Show the hooks all steps that were kept for their next turn, so that their states hold what is known."""
        for i in range(len(self.hooks)):
            self._show(i, sizes, Decision(), due=False)

    def seat(self, joined: Sequence[int], sizes: Sizes) -> None:
        """Others sit on these seats from now on: what the hooks have learned of those before begins anew."""
        if not joined:
            return
        self.catch_up(sizes)
        for i, hook in enumerate(self.hooks):
            self.states[i] = begun_anew(self.states[i], hook.handler.init, self.n_workers, joined)
            self._joined[i].update(joined)

    def begun(self) -> list[Any]:
        """States in which the hooks have seen nothing yet."""
        return [h.handler.init(self.n_workers) for h in self.hooks]

    def restart(self, states: Sequence[Any]) -> None:
        """Go on from these states. The steps that were kept for the hooks' next turn are dropped."""
        self.states = list(states)
        self._seen = [[] for _ in self.hooks]

    def _show(self, i: int, sizes: Sizes, asked: Decision, *, due: bool = True) -> Decision | None:
        """`asked` is what earlier hooks of this barrier asked for."""
        hook, decision = self.hooks[i], None
        bounds = sizes.bounds(None if asked.shares is None else sizes.checked(asked.shares))
        wanted = sizes.nearest(sum(sizes.target) if asked.global_batch is None else asked.global_batch, bounds)
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
                bounds,
                due and number == len(seen),
                step.members,
                step.joined,
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
