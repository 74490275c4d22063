"""Batch sizes, from a request for others to the step that is the first to have them.

    request    `Hooks`, or `Program.rescale`, hands on what was asked for. The global batch is clipped and rounded to
               one that can be (`Limits.nearest`); the quantum follows it; `split` makes sizes of it. These are
               *pending*.
    prepare    What steps of these sizes need is made beside the steps (`Readiness`).
    status     In every step each process says whether it is `ready` for the pending sizes, and `able` to make any;
               `agreed` is what all of them are (`status.py`).
    step_done  Where all are ready the pending sizes are taken up, between the same two steps on all workers.

A program has such sizes, and so has a simulated cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaptive.base.decision import Decision, Limits
from adaptive.base.errors import BatchSizeError
from adaptive.base.numbers import brief, whole

from .readiness import AtOnce, Readiness
from .split import check_shares, equal, split

Split = tuple[int, ...]  # examples, by worker


class BatchSizes:
    """The split in force, and those that were asked for. Replicated, but for `ready` and `able`.

    Args:
      global_batch: of the first step.
      shares: relative sizes of the first batches; equal where there are none.
      limits: what every split has to keep.
      quantum: what later sizes are rounded to. By default one that follows the global batch; then the first sizes are
        rounded to nothing but `limits.multiple`.

    Attributes:
      current: examples by worker, in the next step.
      previous: in the step before the last.
      pending: what was asked for, and is taken up at the first step for which every worker can make its new size. A
        later request takes its place.
      next: what was asked for behind `pending`, where sizes are prepared `one_by_one`.
      shares: what was asked for last.
      limits: with the quantum of the sizes that were asked for last.
      one_by_one: whether a later request waits behind the one that is being prepared. Where every size has to be
        compiled, a driver that asks for another one in every step would never get any, otherwise.
      resizable: whether sizes change at all.
      waits: whether new sizes are taken up at once, and the program stands still until they can be made.
    """

    def __init__(
        self, global_batch: int, shares: Sequence[float] | None, limits: Limits, *, quantum: int | None = None
    ):
        n = len(limits.lower)
        self._follows = quantum is None
        self.limits = limits._replace(quantum=limits.multiple if quantum is None else quantum)
        self.shares = tuple(check_shares([1.0] * n if shares is None else shares, n).tolist())
        total = self.check_global(global_batch)
        self.current: Split = equal(total, limits) if shares is None else split(total, self.shares, self.limits)
        self._set_quantum(total)
        self.previous = self.current
        self.pending: Split | None = None
        self.next: Split | None = None
        self.one_by_one = self.waits = False
        self.resizable = True
        self._readiness: Readiness = AtOnce()
        self._all_ready = self._all_able = False

    def take_effect(
        self, readiness: Readiness, *, one_by_one: bool = False, waits: bool = False, resizable: bool = True
    ) -> None:
        """Say when sizes can be made; until then, they can be at once."""
        self._readiness, self.one_by_one, self.waits, self.resizable = readiness, one_by_one, waits, resizable

    @property
    def target(self) -> Split:
        """The split that was asked for last."""
        return self.next or self.pending or self.current

    # --- request ------------------------------------------------------------------------------------------------------

    def request(self, decision: Decision, hooks: Sequence[str] = ()) -> list[str]:
        """Make a decision's sizes pending.

        Args:
          hooks: names of those that have decided.

        Returns:
          Notes on what was asked for and cannot be.

        Raises:
          BatchSizeError: the sizes stay as they are (`resizable`).
        """
        notes, total, shares = [], sum(self.target), self.shares
        if decision.global_batch is not None:
            total = self.limits.nearest(decision.global_batch)
            if total != decision.global_batch:
                by = f"{_who(hooks)}: " if hooks else ""
                notes.append(f"{by}global batch {brief(decision.global_batch)} {self._changed_to(total)}.")
        if decision.shares is not None:
            shares = tuple(check_shares(decision.shares, len(self.shares)).tolist())
        if decision.shares is not None or total != sum(self.target):  # or the split stays, to the last example
            self._set_quantum(total)
            sizes = split(total, shares, self.limits)
            if not self.resizable and sizes != self.current:
                raise BatchSizeError(
                    f"{_who(hooks)} asked for batch sizes {sizes}, but this program's stay as they are, "
                    f"{self.current}: it was made with resizable=False. Leave that out of ad.Program(...) where sizes "
                    "are to change."
                )
            self.shares = shares
            self._put(sizes)
        if self.waits and self.pending is not None:
            self._take_up()
            self._readiness.wait_for(self.current)
        self._prepare()
        if self._all_able:
            self._take_up()
        return notes

    def _put(self, sizes: Split) -> None:
        if self.one_by_one and self.pending is not None and sizes != self.current:
            self.next = None if sizes == self.pending else sizes
        else:
            self.pending, self.next = None if sizes == self.current else sizes, None

    def _changed_to(self, total: int) -> str:
        limits = self.limits
        if total == limits.most:
            by_data = limits.examples < sum(limits.upper)
            return f"clipped to {total}, {'the size of the data set' if by_data else 'the most that workers may hold'}"
        if total == limits.least:
            return f"clipped to {total}, the least for {len(limits.lower)} workers"
        return f"rounded to {total}, a multiple of {limits.multiple}"

    def _set_quantum(self, total: int) -> None:
        if self._follows:
            quantum = auto_quantum(total, len(self.shares), self.limits.multiple)
            self.limits = self.limits._replace(quantum=quantum)

    def _prepare(self) -> None:
        self._readiness.prepare(self.current if self.pending is None else self.pending, self.current)

    # --- readiness ----------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether this process can make the pending sizes. Local."""
        return self.pending is not None and self._readiness.ready_for(self.pending)

    @property
    def able(self) -> bool:
        """Whether this process can make any sizes, now and from now on. Local."""
        return self._readiness.ready_for_any()

    def agreed(self, *, ready: bool, able: bool) -> None:
        """Take what all processes are, of which each has said so in this step. Once all are able, they stay so."""
        self._all_ready, self._all_able = ready, self._all_able or able

    # --- force --------------------------------------------------------------------------------------------------------

    def step_done(self) -> None:
        """A step has run with the current sizes. The next one has the pending ones, if all can make them."""
        self.previous = self.current
        ready, self._all_ready = self._all_ready, False  # was said of these; the next step may end with nothing said
        if self.pending is not None and (ready or self._all_able):
            self._take_up()
            if self.pending is not None:
                self._prepare()

    def _take_up(self) -> None:
        if self.pending is not None:
            self.current, self.pending, self.next = self.pending, self.next, None

    def restart(self, sizes: Sequence[int], shares: Sequence[float]) -> None:
        """Take up a split that was in force before, and the shares that it was made by. Both must be valid."""
        self.shares = tuple(shares)
        self.current = self.previous = tuple(sizes)
        self.pending = self.next = None
        self._all_ready = False
        self._set_quantum(sum(self.current))

    # --- what can be asked for ----------------------------------------------------------------------------------------

    def exactly(self, global_batch: Any = None, shares: Any = None) -> Decision:
        """A decision for these, neither clipped nor rounded.

        Raises:
          BatchSizeError: they cannot be.
        """
        return Decision(
            None if global_batch is None else self.check_global(global_batch),
            None if shares is None else tuple(check_shares(shares, len(self.shares)).tolist()),
        )

    def check_global(self, global_batch: Any) -> int:
        """A valid global batch, or an error that says why it is none."""
        limits, number = self.limits, whole(global_batch)
        n, unit = len(limits.lower), limits.multiple
        if number is None:
            raise BatchSizeError(f"global_batch must be a whole number of examples; got {global_batch!r}.")
        if number < limits.least:
            raise BatchSizeError(
                f"global_batch={brief(number)} is too small for {n} workers: each takes at least {_examples(unit)} in "
                "a step."
                if number > 0
                else f"global_batch must be positive; got {brief(number)}."
            )
        if number > limits.examples:
            raise BatchSizeError(
                f"global_batch={brief(number)} is larger than the data set, which has {limits.examples} examples."
            )
        if number % unit:
            below = number // unit * unit
            raise BatchSizeError(
                f"global_batch={number} is no multiple of {unit}, the minibatches that the driver cuts every "
                f"local batch into. The nearest are {below} and {below + unit}."
            )
        if number > limits.most:
            raise BatchSizeError(
                f"global_batch={number} is more than the {n} workers may take together: {sum(limits.upper)}."
            )
        return number


def auto_quantum(global_batch: int, n_workers: int, multiple: int = 1) -> int:
    """A power of two of about a sixteenth of a worker's batch: rounding costs 3 % at most, and a size is a few pieces.
    Times `multiple`, of which batches are made.
    """
    return multiple << max(0, (global_batch // multiple // n_workers // 16).bit_length() - 1)


def _who(hooks: Sequence[str]) -> str:
    return f"hook {', '.join(map(repr, hooks))}" if hooks else "program.rescale"


def _examples(number: int) -> str:
    return "one example" if number == 1 else f"{number} examples"
