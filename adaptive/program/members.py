"""Changes of membership between two steps: workers that leave, join, or wait in reserve until they join.

A joining process receives the state of the others from memory to memory. That is more than a checkpoint, because the
run continues: pending sizes, the digest of decisions, the run's limit. Local state has its initial value on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from adaptive.base.process.source_lines import name_workers
from adaptive.base.roster import Roster
from adaptive.base.world import Loss, TransferPayload

from .parts import ProgramParts


class RunEnds(Exception):
    """The run has no next step. Raised on all processes of the run."""


class RunOver(RunEnds):
    """The run for which this process was in reserve has ended; this process has the workers' final state."""


class AllLeave(RunEnds):
    """Processes received a termination signal, and the others cannot continue; the message gives the reason."""


class Members:
    """The members for which a program's state is valid, and their changes between two steps. Replicated.

    Attributes:
      joined_in_generation: the generation in which each member joined, by worker slot.
    """

    # What a joining process takes over from the others, before `_adopted`.
    TRANSFERRED = ("joined_in_generation", "_joined", "_notes", "_n_losses")

    def __init__(self, parts: ProgramParts):
        self._parts, self._world = parts, parts.world
        self.joined_in_generation, first = parts.roster  # some may have been lost since
        self._generation: int | None = first  # of `joined_in_generation`, or `None`
        self._joined: list[int] = []  # since the last `drain_events`
        self._notes: list[str] = []
        self._n_losses = 0  # number of the world's losses that were drained
        parts.engine.workers.change_members(self._places(self.joined_in_generation), ())

    @property
    def _changed(self) -> bool:
        """Whether any worker has left or joined since `_refresh`."""
        return self._world.generation != self._generation

    @property
    def settled(self) -> bool:
        """Whether no worker leaves, joins, is in reserve, or was lost since the last step: `apply` would do nothing."""
        world = self._world
        return not (self._parts.membership.due or world.in_reserve or world.needs_state_transfer or self._changed)

    def apply(self) -> None:
        """Apply all pending leaves, joins and losses. A process in reserve waits here until it joins. Communicates.

        Raises:
          RunEnds: the run has no next step; `RunOver` on a process in reserve when the run has ended.
        """
        p, world = self._parts, self._world
        self._leave_and_join()
        while world.in_reserve:
            world.wait(p.engine.kernels.can_join)
            if not world.in_reserve:
                p.run.forget_seconds()
        over = world.needs_state_transfer and not world.run_under_way
        self.transfer_state()
        if over:
            raise RunOver
        if self._changed:
            self._refresh()

    def _leave_and_join(self) -> None:
        membership, name, step = self._parts.membership, self._parts.name, self._parts.run.step
        if not membership.due or self._world.in_reserve:
            return
        leavers = membership.change(f"after step {step} of {name}")
        if membership.why_all_leave:
            signals = " and ".join(sorted({leaver.signal for leaver in leavers if leaver.signal}))
            raise AllLeave(f"{membership.why_all_leave} ({signals})")
        if leavers:
            self._notes.append(f"left after step {step}, upon a termination signal: {', '.join(map(str, leavers))}.")

    def _refresh(self) -> None:
        """Read the world's members; split batches over them, and reset hooks' states for replaced workers."""
        p, (there, generation) = self._parts, Roster.of(self._world)
        joined = [slot for slot, since in there.items() if self.joined_in_generation.get(slot) != since]
        p.hooks.change_members(joined, p.sizes)
        p.engine.workers.change_members(self._places(there), self._places(joined))
        self.joined_in_generation, self._generation = there, generation
        new_losses = self._world.losses[self._n_losses :]
        lost = {slot for loss in new_losses for slot in loss.workers}  # a slot may have a new worker already
        self._notes += p.sizes.change_members(list(there), joined, lost)
        self._joined += joined
        if joined and p.plan.has_local:
            note = "joined, with the initial value of the state that is kept per worker."
            self._notes.append(f"{name_workers(joined)} {note}")

    def _places(self, slots: Iterable[int]) -> list[int]:
        """Return the local indices of the given worker slots that belong to this process. Local."""
        workers = self._world.workers
        return [workers.index(slot) for slot in slots if slot in workers]

    def drain_events(self) -> tuple[tuple[int, ...], tuple[Loss, ...], list[str]]:
        """Return and clear what changed since the last call: worker slots with a new worker, losses, and notes."""
        lost = self._world.losses[self._n_losses :]
        events = tuple(self._joined), lost, [*map(str, lost), *self._notes]
        self._joined, self._notes, self._n_losses = [], [], len(self._world.losses)
        return events

    def restart(self, members: Iterable[int]) -> None:
        """Continue from a checkpoint with these members. Other current members join before the next step."""
        there, _ = Roster.of(self._world)
        self.joined_in_generation = {slot: there.get(slot, 0) for slot in members}
        self._adopted()

    def _adopted(self) -> None:
        """Continue with other members, set in `joined_in_generation`."""
        there, generation = Roster.of(self._world)
        self._generation = generation if self.joined_in_generation == there else None
        self._parts.engine.workers.change_members(self._places(self.joined_in_generation), ())

    # --- the state for joining processes ------------------------------------------------------------------------------

    def transfer_state(self) -> None:
        """Send the program's state to joining processes, or receive it as one of them. Communicates if any joins."""
        if not self._world.needs_state_transfer:
            return
        parts = self._parts
        parts.hooks.catch_up(parts.sizes)
        about = f"the state of {parts.name} for joining workers"
        received = self._world.transfer_state(self.pack, parts.engine.workers.receive_buffers, about)
        if received is not None:
            self.unpack(received)

    def pack(self) -> TransferPayload:
        """Return the state of this process's program, after `Hooks.catch_up`: a small picklable object, and the
        engine's replicated arrays, contiguous.
        """
        p = self._parts
        small = [[getattr(part, name) for name in part.TRANSFERRED] for part in self._small_parts()]
        return (small, p.stream.cursors, p.stream.place()), p.engine.workers.export()

    def unpack(self, received: TransferPayload) -> None:
        """Replace the state of this process's program by a result of `pack`."""
        p = self._parts
        (small, cursors, place), arrays = received
        for part, values in zip(self._small_parts(), small, strict=True):
            for name, value in zip(part.TRANSFERRED, values, strict=True):
                setattr(part, name, value)
        self._adopted()
        p.hooks.restart(p.hooks.states)
        p.stream.go_on(cursors, place)
        p.engine.workers.adopt(arrays)
        p.hyperparameters.restart()

    def _small_parts(self) -> tuple[Any, ...]:
        p = self._parts
        return p.run, p.decisions, p.skipped, p.sizes, p.membership, p.digest, self, p.hooks
