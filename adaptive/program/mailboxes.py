"""The boards through which a program's workers read each other's published state; made between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from adaptive.base.board import Board, OffersBoards
from adaptive.base.errors import CollectiveError
from adaptive.base.world import World
from adaptive.graph.plan import Plan
from adaptive.operators.peer_read import Boards, Pairing


class ProgramBoards:
    """The boards of one program.

    Args:
      boards: what its kernels look into.
      name: of the program.

    Raises:
      CollectiveError: the driver publishes, and the world has no boards, or no round ends.
    """

    def __init__(self, world: World, plan: Plan, boards: Boards, name: str):
        self._world, self._pairings, self._boards, self._name = world, plan.graph.pairings, boards, name
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
        """Make boards for the present members, if there are none. Communicates. Returns whether it did."""
        generation = self._world.generation
        if not self._pairings or self._generation == generation:
            return False
        about = f"boards of {self._name}"
        before: Sequence[Board | None] = self._boards.boards or [None] * len(self._pairings)
        boards = [
            self._offers.board(pairing.nbytes, about, old) for pairing, old in zip(self._pairings, before, strict=True)
        ]
        self._boards.restart(boards, self._world.members)
        self._generation = generation
        return True

    def forget(self) -> None:
        """Make new boards before the next step: the numbers of rounds have changed."""
        self._generation = None


def _offering(world: World, pairing: Pairing) -> OffersBoards:
    why = (
        world.why_no_board() if isinstance(world, OffersBoards) else "it knows nothing but exchanges, at which all meet"
    )
    if why or not isinstance(world, OffersBoards):
        raise CollectiveError(f"{pairing.line}: {world!r} has no board on which workers could publish: {why}.")
    return world
