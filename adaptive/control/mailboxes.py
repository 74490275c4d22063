"""The mailboxes of a program, in which workers read each other's parameters without waiting."""

from __future__ import annotations

from collections.abc import Sequence

from adaptive.base.errors import CollectiveError
from adaptive.base.mailbox import Mailbox
from adaptive.base.world import World
from adaptive.graph.plan import Plan
from adaptive.operators.peer_read import PeerMailboxes


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
