"""Who is there: workers sit on seats, and a seat may be empty.

A program is traced, laid out and compiled for all seats of its world: its *capacity*. Who sits on them is a run-time
matter.
"""

from __future__ import annotations

from .world import Loss


class Seats:
    """What worlds whose workers come and go say of them. Replicated.

    Args:
      size: how many seats there are; somebody sits on each.
    """

    losses: tuple[Loss, ...] = ()  # who leaves says so
    unattended: tuple[int, ...] = ()  # this process carries all

    def __init__(self, size: int):
        self._since: list[int | None] = [0] * size
        self.generation = 0

    @property
    def members(self) -> tuple[int, ...]:
        """The seats that are taken."""
        return tuple(seat for seat, since in enumerate(self._since) if since is not None)

    @property
    def since(self) -> tuple[int, ...]:
        """For each member, the generation in which it came. No two members of a seat have the same."""
        return tuple(since for since in self._since if since is not None)

    def leave(self, seat: int) -> None:
        """Empty a seat.

        Raises:
          ValueError: there is no such seat, nobody sits there, or nobody else is left.
        """
        if self._at(seat) is None:
            raise ValueError(f"seat {seat} is empty already: who leaves must be there.")
        if len(self.members) == 1:
            raise ValueError(f"the worker on seat {seat} is the last one: somebody has to stay.")
        self._since[seat] = None
        self.generation += 1

    def join(self, seat: int) -> None:
        """Fill an empty seat, with a new worker: nothing is known of it.

        Raises:
          ValueError: there is no such seat, or it is taken.
        """
        if self._at(seat) is not None:
            raise ValueError(f"seat {seat} is taken: who joins needs an empty one.")
        self.generation += 1
        self._since[seat] = self.generation

    def _at(self, seat: int) -> int | None:
        if not 0 <= seat < len(self._since):
            raise ValueError(f"there is no seat {seat}; seats are 0 … {len(self._since) - 1}.")
        return self._since[seat]
