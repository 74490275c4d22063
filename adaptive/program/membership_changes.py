"""Changes of membership between two steps: workers that leave, join, or wait in reserve until they join."""

from __future__ import annotations

from collections.abc import Sequence

from adaptive.base.world import TransferPayload

from .parts import ProgramParts, RunLimit, RunProgress
from .state_transfer import pack, receive_buffers, unpack
from .tracing import Traced


class RunEnds(Exception):
    """The run has no next step. Raised on all processes of the run."""


class RunOver(RunEnds):
    """The run for which this process was in reserve has ended; this process has the workers' final state.

    Attributes:
      progress: the progress of the run.
    """

    def __init__(self, progress: RunProgress):
        super().__init__()
        self.progress = progress


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

    def apply(self, progress: RunProgress) -> RunProgress:
        """Apply all pending leaves, joins and losses. A process in reserve waits here until it joins.
        Communicates.

        Returns:
          The run's progress: `progress`; on a joining process, that of the other workers.

        Raises:
          RunEnds: the run has no next step; `RunOver` on a process in reserve when the run has ended.
        """
        self._change(progress.step)
        while self._world.in_reserve:
            self._world.wait(self._parts.engine.kernels.can_join)
            if not self._world.in_reserve:
                self._parts.clock.restart()
        over = self._world.needs_state_transfer and not self._world.run_under_way
        progress = self.transfer_state(progress)
        if over:
            raise RunOver(progress)
        members = self._parts.members
        if members.changed:
            joined = members.refresh()
            self._parts.clock.forget(members.places(joined))
            self._note_initial_state(joined)
        return progress

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

    def transfer_state(self, progress: RunProgress) -> RunProgress:
        """Send the program's state to joining processes, or receive it as one of them. Communicates if any joins.

        Returns:
          The run's progress; on a joining process that of the others.
        """
        if not self._world.needs_state_transfer:
            return progress
        parts = self._parts
        parts.hooks.catch_up(parts.sizes)
        about = f"the state of {self._parts.name} for joining workers"
        received = self._world.transfer_state(
            lambda: pack(parts, tuple(progress)), lambda: receive_buffers(parts), about
        )
        if received is None:
            return progress
        return self._unpack(received)

    def _unpack(self, received: TransferPayload) -> RunProgress:
        step, limit, stopped, run_id, traced = unpack(self._parts, received)
        return RunProgress(step, RunLimit(*limit), stopped, run_id, traced and Traced(*traced))
