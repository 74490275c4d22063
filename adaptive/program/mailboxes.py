"""The mailboxes through which a program's workers read each other's published state; made between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from adaptive.base.errors import CollectiveError
from adaptive.base.mailbox import Mailbox, OffersMailboxes
from adaptive.base.world import World
from adaptive.graph.plan import Plan
from adaptive.operators.peer_read import Pairing, PeerMailboxes


class ProgramMailboxes:
    """The mailboxes of one program.

    Args:
      mailboxes: what its kernels look into.
      name: of the program.

    Raises:
      CollectiveError: the driver publishes, and the world has no mailboxes, or no round ends.
    """

    def __init__(self, world: World, plan: Plan, mailboxes: PeerMailboxes, name: str):
        self._world, self._pairings, self._mailboxes, self._name = world, plan.graph.pairings, mailboxes, name
        self._generation: int | None = None  # for whose members they were made
        for pairing in self._pairings[:1]:
            if not plan.messages:
                raise CollectiveError(
                    f"{pairing.line}: nothing in this driver ends a round, at which all workers meet. Average the "
                    "replicas after the local steps:\n"
                    "    params = comm.all_reduce(params)"
                )
            self._offers = _offering(world, pairing)

    def make(self) -> bool:
        """Make mailboxes for the present members, if there are none. Communicates. Returns whether it did."""
        generation = self._world.generation
        if not self._pairings or self._generation == generation:
            return False
        about = f"mailboxes of {self._name}"
        before: Sequence[Mailbox | None] = self._mailboxes.mailboxes or [None] * len(self._pairings)
        mailboxes = [
            self._offers.create_mailbox(pairing.nbytes, about, old)
            for pairing, old in zip(self._pairings, before, strict=True)
        ]
        self._mailboxes.restart(mailboxes, self._world.members)
        self._generation = generation
        return True

    def forget(self) -> None:
        """Make new mailboxes before the next step: the numbers of rounds have changed."""
        self._generation = None


def _offering(world: World, pairing: Pairing) -> OffersMailboxes:
    why = (
        world.why_no_mailbox()
        if isinstance(world, OffersMailboxes)
        else "it knows nothing but exchanges, at which all meet"
    )
    if why or not isinstance(world, OffersMailboxes):
        raise CollectiveError(f"{pairing.line}: {world!r} has no mailbox on which workers could publish: {why}.")
    return world
