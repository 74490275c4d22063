"""Changes of membership between two steps: workers that leave, join, or wait in reserve until they join.

A joining process receives the state of the others from memory to memory. That is more than a checkpoint, because the
run continues: pending sizes, the digest of decisions, the run's limit. Local state (`per_worker_state`) is not sent: it
has its initial value on a new worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaptive.base.world import TransferPayload

from .parts import ProgramParts


class RunEnds(Exception):
    """The run has no next step. Raised on all processes of the run."""


class RunOver(RunEnds):
    """The run for which this process was in reserve has ended; this process has the workers' final state."""


class AllLeave(RunEnds):
    """Processes received a termination signal, and the others cannot continue; the message gives the reason."""


class MembershipChanges:
    """Applies changes of membership between two steps of a program.

    Args:
      parts: the program's parts. A joining process receives their state.
    """

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
            workers = f"worker{'s' if len(joined) > 1 else ''} {', '.join(map(str, joined))}"
            self._parts.members.note(f"{workers} joined, with the initial value of the state that is kept per worker.")

    def _change(self, step: int) -> None:
        membership = self._parts.membership
        if not membership.due or self._world.in_reserve:
            return
        leavers = membership.change(f"after step {step} of {self._parts.name}")
        if membership.all_leave:
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
        # Mapping new memory takes several times as long as writing, so a joining process reuses its own.
        received = self._world.transfer_state(self.pack, parts.engine.workers.receive_buffers, about)
        if received is not None:
            self.unpack(received)

    def pack(self) -> TransferPayload:
        """Return the state of this process's program, after `Hooks.catch_up`: a small picklable object, and the
        engine's replicated arrays, contiguous.
        """
        p, run = self._parts, self._parts.run
        progress = run.step, run.limit, run.run_id, p.decisions.stopped, p.skipped.in_a_row
        small = [part.export() for part in self._small_parts()]
        return (progress, small, p.stream.cursors, p.stream.place()), p.engine.workers.export()

    def unpack(self, received: TransferPayload) -> None:
        """Replace the state of this process's program by a result of `pack`."""
        p, run = self._parts, self._parts.run
        (progress, small, cursors, place), arrays = received
        run.step, run.limit, run.run_id, p.decisions.stopped, p.skipped.in_a_row = progress
        for part, state in zip(self._small_parts(), small, strict=True):
            part.adopt(state)
        p.stream.go_on(cursors, place)
        p.engine.workers.adopt(arrays)
        p.hyperparameters.restart()

    def _small_parts(self) -> tuple[Any, ...]:
        p = self._parts
        return p.sizes, p.membership, p.digest, p.members, p.hooks
