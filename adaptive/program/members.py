"""Changes of membership between two steps: workers that leave, join, or wait in reserve until they join.

A joining process receives the state of the others from memory to memory. That is more than a checkpoint, because the
run continues: pending sizes, the digest of decisions, the run's limit. Local state (`per_worker_state`) is not sent: it
has its initial value on a new worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from adaptive.base.errors import CollectiveError
from adaptive.base.mailbox import Mailbox
from adaptive.base.process.source_lines import name_workers
from adaptive.base.roster import Roster
from adaptive.base.world import Loss, TransferPayload, World
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.hooks import Hooks
from adaptive.graph.plan import Plan
from adaptive.operators.peer_read import PeerMailboxes
from adaptive.runtime.engine import Engine

if TYPE_CHECKING:
    from .parts import ProgramParts


class MemberTracker:
    """The members for which a program's state is valid. Replicated.

    Args:
      roster: the members for which the first sizes were chosen; some may have been lost since.

    Attributes:
      joined_in_generation: the generation in which each member joined, by worker slot.
    """

    # What a joining process takes over from the others, before `adopted`.
    TRANSFERRED = ("joined_in_generation", "_joined", "_notes", "_n_losses")

    def __init__(self, world: World, engine: Engine, hooks: Hooks, sizes: BatchSizes, roster: Roster):
        self._world, self._engine, self._hooks, self._sizes = world, engine, hooks, sizes
        self.joined_in_generation = roster.joined_in_generation
        self._generation: int | None = roster.generation  # of `joined_in_generation`, or `None`
        self._joined: list[int] = []  # since the last `drain_events`
        self._notes: list[str] = []
        self._n_losses = 0  # number of the world's losses that were drained
        engine.workers.change_members(self.places(self.joined_in_generation), ())

    @property
    def changed(self) -> bool:
        """Whether any worker has left or joined since `refresh`."""
        return self._world.generation != self._generation

    def places(self, slots: Iterable[int]) -> list[int]:
        """Return the local indices of the given worker slots that belong to this process. Local."""
        workers = self._world.workers
        return [workers.index(slot) for slot in slots if slot in workers]

    def refresh(self) -> list[int]:
        """Read the world's members; split batches over them, and reset hooks' states for replaced workers.

        Returns:
          The worker slots that have a new worker.
        """
        there, generation = Roster.of(self._world)
        joined = [slot for slot, since in there.items() if self.joined_in_generation.get(slot) != since]
        self._hooks.change_members(joined, self._sizes)
        self._engine.workers.change_members(self.places(there), self.places(joined))
        self.joined_in_generation, self._generation = there, generation
        new_losses = self._world.losses[self._n_losses :]
        lost = {slot for loss in new_losses for slot in loss.workers}  # a slot may have a new worker already
        self._notes += self._sizes.change_members(list(there), joined, lost)
        self._joined += joined
        return joined

    def drain_events(self) -> tuple[tuple[int, ...], tuple[Loss, ...], list[str]]:
        """Return and clear what changed since the last call: worker slots with a new worker, losses, and notes."""
        lost = self._world.losses[self._n_losses :]
        events = tuple(self._joined), lost, [*map(str, lost), *self._notes]
        self._joined, self._notes, self._n_losses = [], [], len(self._world.losses)
        return events

    def note(self, text: str) -> None:
        """Add a note to the next report."""
        self._notes.append(text)

    def restart(self, members: Iterable[int]) -> None:
        """Continue from a checkpoint with these members. Other current members join before the next step."""
        there, _ = Roster.of(self._world)
        self.joined_in_generation = {slot: there.get(slot, 0) for slot in members}
        self.adopted()

    def adopted(self) -> None:
        """Continue with other members, set in `joined_in_generation`."""
        there, generation = Roster.of(self._world)
        self._generation = generation if self.joined_in_generation == there else None
        self._engine.workers.change_members(self.places(self.joined_in_generation), ())


class RunEnds(Exception):
    """The run has no next step. Raised on all processes of the run."""


class RunOver(RunEnds):
    """The run for which this process was in reserve has ended; this process has the workers' final state."""


class AllLeave(RunEnds):
    """Processes received a termination signal, and the others cannot continue; the message gives the reason."""


class MembershipChanges:
    """Applies changes of membership between two steps of a program."""

    def __init__(self, parts: ProgramParts):
        self._world, self._parts = parts.world, parts

    @property
    def settled(self) -> bool:
        """Whether no worker leaves, joins, is in reserve, or was lost since the last step: `apply` would do nothing."""
        parts, world = self._parts, self._world
        return not (parts.membership.due or world.in_reserve or world.needs_state_transfer or parts.members.changed)

    def apply(self) -> None:
        """Apply all pending leaves, joins and losses. A process in reserve waits here until it joins. Communicates.

        Raises:
          RunEnds: the run has no next step; `RunOver` on a process in reserve when the run has ended.
        """
        self._change(self._parts.run.step)
        while self._world.in_reserve:
            self._world.wait(self._parts.engine.kernels.can_join)
            if not self._world.in_reserve:
                self._parts.clock.restart()
        over = self._world.needs_state_transfer and not self._world.run_under_way
        self.transfer_state()
        if over:
            raise RunOver
        members = self._parts.members
        if members.changed:
            joined = members.refresh()
            self._parts.clock.forget(members.places(joined))
            self._note_initial_state(joined)

    def _note_initial_state(self, joined: Sequence[int]) -> None:
        """Add a note if workers joined whose per-worker state is not that of the workers whose slots they take."""
        if joined and self._parts.plan.has_local:
            note = "joined, with the initial value of the state that is kept per worker."
            self._parts.members.note(f"{name_workers(joined)} {note}")

    def _change(self, step: int) -> None:
        membership = self._parts.membership
        if not membership.due or self._world.in_reserve:
            return
        leavers = membership.change(f"after step {step} of {self._parts.name}")
        if membership.why_all_leave:
            signals = " and ".join(sorted({leaver.signal for leaver in leavers if leaver.signal}))
            raise AllLeave(f"{membership.why_all_leave} ({signals})")
        if leavers:
            who = ", ".join(map(str, leavers))
            self._parts.members.note(f"left after step {step}, upon a termination signal: {who}.")

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
        p.members.adopted()
        p.hooks.restart(p.hooks.states)
        p.stream.go_on(cursors, place)
        p.engine.workers.adopt(arrays)
        p.hyperparameters.restart()

    def _small_parts(self) -> tuple[Any, ...]:
        p = self._parts
        return p.run, p.decisions, p.skipped, p.sizes, p.membership, p.digest, p.members, p.hooks


class ProgramMailboxes:
    """The mailboxes of one program.

    Raises:
      CollectiveError: the driver publishes, but the world has no mailboxes, or no collective ends a round.
    """

    def __init__(self, world: World, plan: Plan, mailboxes: PeerMailboxes, name: str):
        self._world, self._pairings, self._mailboxes, self._name = world, plan.graph.pairings, mailboxes, name
        self._generation: int | None = None  # the generation of members that the mailboxes belong to
        for pairing in self._pairings[:1]:
            if not plan.messages:
                raise CollectiveError(
                    f"{pairing.line}: a round must end with a collective, and this driver has none. Average the "
                    "replicas after the local steps:\n"
                    "    params = comm.all_reduce(params)"
                )
            if why := world.why_no_mailbox():
                raise CollectiveError(f"{pairing.line}: {world!r} has no mailboxes: {why}.")

    def make(self) -> bool:
        """Create mailboxes for the current members, if there are none. Communicates. Returns whether it created any."""
        generation = self._world.generation
        if not self._pairings or self._generation == generation:
            return False
        about = f"mailboxes of {self._name}"
        before: Sequence[Mailbox | None] = self._mailboxes.mailboxes or [None] * len(self._pairings)
        mailboxes = [
            self._world.create_mailbox(pairing.nbytes, about, old)
            for pairing, old in zip(self._pairings, before, strict=True)
        ]
        self._mailboxes.restart(mailboxes, self._world.members)
        self._generation = generation
        return True

    def forget(self) -> None:
        """Create new mailboxes before the next step, because the numbers of rounds have changed."""
        self._generation = None
