"""Who sits on the seats of a world, and what a program does when that has changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from adaptive.base.roster import Roster
from adaptive.base.world import Loss, World
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.hooks import Hooks
from adaptive.runtime.engine import Engine


class Seating:
    """The members of a world as a program knows them. Replicated.

    Args:
      roster: who was there when the sizes were chosen. Processes may have been lost since then.

    Attributes:
      since: the members' seats, and in which generation each came.
    """

    def __init__(self, world: World, engine: Engine, hooks: Hooks, sizes: BatchSizes, roster: Roster):
        self._world, self._engine, self._hooks, self._sizes = world, engine, hooks, sizes
        self.joined_in_generation = roster.joined_in_generation
        self._generation: int | None = roster.generation  # whose members `since` are; `None`: of none
        self._joined: list[int] = []  # since the last report
        self._notes: list[str] = []
        self._told = 0  # of the world's losses
        engine.seat(self.places(self.joined_in_generation), ())

    @property
    def changed(self) -> bool:
        """Whether anybody has left or joined."""
        return self._world.generation != self._generation

    def places(self, seats: Iterable[int]) -> list[int]:
        """Those of these seats that this process carries, by their places in it. Local."""
        workers = self._world.workers
        return [workers.index(seat) for seat in seats if seat in workers]

    def take(self) -> list[int]:
        """Take who is there now: batches are split anew, and what hooks have learned of those who left is forgotten.

        Returns:
          The seats with another worker than before.
        """
        there, generation = Roster.of(self._world)
        joined = [seat for seat, since in there.items() if self.joined_in_generation.get(seat) != since]
        self._hooks.seat(joined, self._sizes)
        self._engine.seat(self.places(there), self.places(joined))
        self.joined_in_generation, self._generation = there, generation
        lost = {seat for loss in self._world.losses[self._told :] for seat in loss.workers}  # a seat may be taken again
        self._notes += self._sizes.seat(list(there), joined, lost)
        self._joined += joined
        return joined

    def tell(self) -> tuple[tuple[int, ...], tuple[Loss, ...], list[str]]:
        """What has happened since this was told last: the seats that others have taken, who was lost, and notes on who
        has come and gone.
        """
        lost = self._world.losses[self._told :]
        told = tuple(self._joined), lost, [*map(str, lost), *self._notes]
        self._joined, self._notes, self._told = [], [], len(self._world.losses)
        return told

    def note(self, text: str) -> None:
        """Tell this with the next report."""
        self._notes.append(text)

    def restart(self, members: Iterable[int]) -> None:
        """Go on with these members. Of those who are there now, the others will have joined by the next step."""
        there, generation = Roster.of(self._world)
        self.joined_in_generation = {seat: there.get(seat, 0) for seat in members}
        self._generation = generation if self.joined_in_generation == there else None
        self._engine.present = self.places(self.joined_in_generation)

    def take_over(self, known: dict[str, Any]) -> None:
        """Know what another process does."""
        vars(self).update(known)
        there, generation = Roster.of(self._world)
        self._generation = generation if self.joined_in_generation == there else None
        self._engine.present = self.places(self.joined_in_generation)
