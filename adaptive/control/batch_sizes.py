"""Batch sizes, from a request to the first step with the new sizes.

    request    `Hooks` or `Program.rescale` passes a request. The global batch is clipped and rounded to a valid one
               (`Limits.nearest`); the quantum follows it; `split` computes the sizes. They are *pending*.
    prepare    The kernels for these sizes are compiled in the background (`Readiness`).
    status     In every step each process reports whether it can run the pending sizes (`can_make_pending`) or any sizes
               (`can_make_any`). `on_agreed` receives the result over all processes (`status.py`).
    step_done  When all processes are ready, the pending sizes come into force, between the same two steps on all.

When the members change (`change_members`), the global batch is split again at once. A process that lacks kernels for
that waits for them.

Programs and simulated clusters both use this class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from adaptive.base.decision import Decision, Limits
from adaptive.base.errors import BatchSizeError
from adaptive.base.revision import Revision
from adaptive.base.split import check_shares, equal, split

from .global_batch import auto_quantum, changed_to, checked_global_batch
from .readiness import Readiness
from .requests import hooks_in_words

NOT_RESIZABLE = "it was built with resizable=False. Remove that from ad.Program(...) if sizes or workers change."

Split = tuple[int, ...]  # examples, by worker


class BatchSizes:
    """The split in force, and the requested ones. Replicated, except `can_make_pending` and `can_make_any`.

    A worker is active if its slot is occupied and its share is not 0.

    Args:
      limits: bounds of every split, for all worker slots.
      quantum: later sizes are rounded to multiples of it. By default it follows the global batch, and the first sizes
        are rounded only to `limits.multiple`.
      members: the occupied worker slots; all by default.

    Attributes:
      current, previous: the splits of the next step, and of the last one.
      target: the split that was requested last.
      pending: the split that is in force from the first step for which every worker is ready: `target`, or, if sizes
        are prepared one by one, an earlier request; `None` if nothing is requested.
      shares: the last requested shares; 0 for empty worker slots.
      wanted: the last requested global batch.
      limits: with the quantum of the last requested sizes.
      needed: worker slots whose workers must take examples.
      fixed_by: why sizes never change, and what to change; "" if they do.
    """

    # What a joining process takes over from the others.
    TRANSFERRED = (
        *("current", "previous", "pending", "target", "shares", "wanted", "limits", "members"),
        *("_all_ready", "_all_able"),
    )

    def __init__(
        self,
        global_batch: int,
        shares: Sequence[float] | None,
        limits: Limits,
        *,
        quantum: int | None = None,
        members: Sequence[int] | None = None,
    ):
        n = len(limits.lower)
        self._follows = quantum is None
        self.limits = limits._replace(quantum=limits.multiple if quantum is None else quantum)
        self._last_bounds: tuple[Limits | None, Any, Limits] = None, (), self.limits  # of `bounds`
        self.members = tuple(range(n) if members is None else members)
        self.needed: tuple[int, ...] = ()
        self.shares = tuple(self.checked([1.0] * n if shares is None else shares).tolist())
        self.wanted = total = checked_global_batch(global_batch, self.bounds())
        first = equal(total, self.bounds()) if shares is None else split(total, self.shares, self.limits)
        self.current = self.previous = self.target = first
        self.pending: Split | None = None
        self.limits = self._with_quantum(total, self.shares)
        self._one_by_one = self._waits = False
        self.fixed_by = ""
        self.revision = Revision()
        self._readiness = Readiness()
        self._all_ready = self._all_able = False

    def take_effect(
        self,
        readiness: Readiness,
        *,
        one_by_one: bool = False,
        waits: bool = False,
        fixed_by: str = "",
        revision: Revision | None = None,
    ) -> None:
        """Set how sizes are prepared. Before this call, all sizes count as ready.

        Args:
          one_by_one: whether a later request waits until the pending one is prepared; else a driver that requests
            another size in every step, each of which must be compiled, would never get any.
          waits: whether new sizes come into force at once; the program then waits for their kernels.
        """
        self.revision = revision or self.revision
        self._readiness, self._one_by_one, self._waits, self.fixed_by = readiness, one_by_one, waits, fixed_by

    def must_take(self, slots: Iterable[int]) -> None:
        """Require examples for the workers of these slots, now and in later requests."""
        self.needed = tuple(sorted(set(slots)))
        self.checked(self.shares)

    def bounds(self, shares: Sequence[float] | np.ndarray | None = None) -> Limits:
        """Return the limits of the active workers, with the given shares or the last requested ones."""
        shares = self.shares if shares is None else shares
        of, given, known = self._last_bounds
        if of is not self.limits or given is not shares:  # the same objects in most steps
            known = self.limits.of(np.asarray(shares) > 0)
            self._last_bounds = self.limits, shares, known
        return known

    # --- request ------------------------------------------------------------------------------------------------------

    def request(self, decision: Decision, hooks: Sequence[str] = (), *, for_others: bool = False) -> list[str]:
        """Make a decision's sizes pending; return notes on requests that were changed to possible ones. Raises a
        BatchSizeError if the sizes are fixed.

        Args:
          hooks: names of the hooks that made it.
          for_others: whether members are about to change, so that a larger global batch may be possible soon.
        """
        by, until = f"{hooks_in_words(hooks)}: " * bool(hooks), ", until other workers have joined" * for_others
        weights = np.asarray(self.shares) if decision.shares is None else self.checked(decision.shares, by)
        before, asked = sum(self.target), self.wanted if decision.global_batch is None else decision.global_batch
        known = before if decision.global_batch is None else None
        total, notes = self._nearest(asked, self.bounds(weights), known, by, until)
        if decision.shares is not None or total != before:  # otherwise the split stays exactly as it is
            limits = self._with_quantum(total, weights)
            sizes = split(total, weights, limits)
            if self.fixed_by and sizes != self.current:
                raise BatchSizeError(
                    f"{hooks_in_words(hooks)} asked for batch sizes {sizes}, but this program's batch sizes are fixed, "
                    f"{self.current}: {self.fixed_by}"
                )
            self.shares, self.limits, self.target = tuple(weights.tolist()), limits, sizes
            if not self._one_by_one or self.pending is None or sizes == self.current:
                self.pending = None if sizes == self.current else sizes
            self.revision.increment()
        if decision.global_batch is not None:  # after everything that may raise
            self.wanted = asked if for_others else total
        if self._waits and self.pending is not None:
            self._take_up()
            self._readiness.wait_for(self.current)
        self._prepare()
        if self._all_able:
            self._take_up()
        return notes

    def _nearest(
        self, asked: int, bounds: Limits, known: int | None, by: str = "", until: str = ""
    ) -> tuple[int, list[str]]:
        """Return the nearest possible global batch, and a note if it is neither the requested nor the `known` one."""
        total = bounds.nearest(asked)
        if total in (asked, known):
            return total, []
        return total, [f"{by}global batch {asked!r} {changed_to(total, bounds)}{until}."]

    def _with_quantum(self, total: int, shares: Sequence[float] | np.ndarray) -> Limits:
        """Return the limits, with the quantum for this global batch."""
        if not self._follows:
            return self.limits
        quantum = auto_quantum(total, len(self.bounds(shares).active), self.limits.multiple)
        return self.limits._replace(quantum=quantum)

    def _prepare(self) -> None:
        self._readiness.prepare(self.current if self.pending is None else self.pending, self.current)

    # --- members ------------------------------------------------------------------------------------------------------

    def change_members(self, members: Sequence[int], joined: Sequence[int], lost: Collection[int] = ()) -> list[str]:
        """Split the global batch over the new members, at once; return notes on it, without the `lost` workers.

        A worker in a `joined` slot starts with the mean share of those that stay, because its speed is unknown.
        """
        now = set(members)
        gone = [slot for slot in self.members if slot not in now]
        left = [slot for slot in gone if slot not in lost]
        notes = [f"worker slot {slot} is empty: its worker has left." for slot in left]
        notes += [f"a worker has joined in worker slot {slot}." for slot in joined]
        self.members, shares, stays = tuple(members), np.array(self.shares), np.zeros(len(self.shares), bool)
        stays[list(members)] = True
        stays[list(joined)] = False
        known = shares[stays & (shares > 0)]
        shares[list(joined)] = known.mean() if len(known) else 1.0
        if not shares[list(members)].any():  # those who took examples have all left
            shares[:] = 1.0
        self.shares = tuple(self.checked(shares).tolist())
        return notes + self._split_again()

    def _split_again(self) -> list[str]:
        """Split the requested global batch, as far as it is possible, over the active workers at once; return notes."""
        total, changed = self._nearest(self.wanted, self.bounds(), sum(self.current))
        self.limits = self._with_quantum(total, self.shares)
        self.current = self.target = split(total, self.shares, self.limits)
        self.pending = None
        self.revision.increment()
        if not self._readiness.ready_for(self.current):
            self._readiness.wait_for(self.current)
        self._prepare()
        return changed

    # --- readiness ----------------------------------------------------------------------------------------------------

    @property
    def can_make_pending(self) -> bool:
        """Whether this process can make the pending sizes. Local."""
        return self.pending is not None and self._readiness.ready_for(self.pending)

    @property
    def can_make_any(self) -> bool:
        """Whether this process can make any sizes, now and from now on. Local."""
        return self._readiness.ready_for_any()

    def on_agreed(self, *, can_make_pending: bool, can_make_any: bool) -> None:
        """Apply what all processes reported in this step. `can_make_any` stays true once it is."""
        self._all_ready, self._all_able = can_make_pending, self._all_able or can_make_any

    # --- steps --------------------------------------------------------------------------------------------------------

    def step_done(self) -> None:
        """Record a step with the current sizes. The next one has the pending sizes, if all processes can make them."""
        self.previous = self.current
        ready, self._all_ready = self._all_ready, False  # valid for one step
        if self.pending is not None and (ready or self._all_able):
            self._take_up()
            if self.pending is not None:
                self._prepare()

    def _take_up(self) -> None:
        if self.pending is not None:
            self.current = self.pending
            self.pending = None if self.target == self.current else self.target
            self.revision.increment()

    def restart(
        self,
        sizes: Sequence[int],
        shares: Sequence[float],
        members: Sequence[int] | None = None,
        wanted: int | None = None,
    ) -> None:
        """Restore a split that was in force before, with its shares, members and requested global batch."""
        self.members = self.members if members is None else tuple(members)
        self.shares, self.wanted = tuple(shares), sum(sizes) if wanted is None else wanted
        self.current = self.previous = self.target = tuple(sizes)
        self.pending = None
        self.revision.increment()
        self._all_ready = False
        self.limits = self._with_quantum(sum(self.current), self.shares)

    # --- validation ---------------------------------------------------------------------------------------------------

    def exactly(self, global_batch: Any = None, shares: Any = None, slots: Sequence[int] | None = None) -> Decision:
        """Return a decision for exactly these sizes, neither clipped nor rounded; `slots`: the future members. Raises a
        BatchSizeError if they cannot have these sizes.
        """
        given = None if shares is None else tuple(self.checked(shares).tolist())
        if global_batch is None and given is None:  # the old global batch may be too small for other workers
            return Decision()
        weights = given or self.shares
        if slots is not None:  # a worker that joins has a share of 1
            there, then = set(self.members), set(slots)
            weights = tuple((s if i in there else 1.0) if i in then else 0.0 for i, s in enumerate(weights))
        total = sum(self.target) if global_batch is None else global_batch
        number = checked_global_batch(total, self.bounds(weights))
        return Decision(None if global_batch is None else number, given)

    def checked(self, shares: Any, by: str = "") -> np.ndarray:
        """Return valid shares, with 0 for empty worker slots. Raises a BatchSizeError if no member has a share, or a
        worker whose value the driver broadcasts has none; `by`: its first words.
        """
        weights = check_shares(shares, len(self.limits.lower))
        there = np.zeros(len(weights), bool)
        there[list(self.members)] = True
        taken = np.where(there, weights, 0.0)
        if not taken.any():
            slots = ", ".join(str(slot) for slot, w in enumerate(weights.tolist()) if w)
            raise BatchSizeError(f"{by}shares give examples only to worker slot {slots}, which is empty.")
        missing = [slot for slot in self.needed if not taken[slot]]
        if missing:
            raise BatchSizeError(
                f"{by}worker {missing[0]} must take at least one example: the driver broadcasts a value of that worker."
            )
        return taken
