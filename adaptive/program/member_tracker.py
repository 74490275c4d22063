"""Tracks the members of a program's world, and updates the program's parts when they change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from adaptive.base.roster import Roster
from adaptive.base.world import Loss, World
from adaptive.control.batch_sizes import BatchSizes
from adaptive.control.hooks import Hooks
from adaptive.runtime.engine import Engine


class MemberTracker:
    """The members for which a program's state is valid. Replicated.

    Args:
      roster: the members for which the first sizes were chosen; some may have been lost since.

    Attributes:
      joined_in_generation: the generation in which each member joined, by worker slot.
    """

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
        self._continue_with({slot: there.get(slot, 0) for slot in members})

    def export(self) -> tuple[Any, ...]:
        """Return the replicated part of the state, for `adopt` on a joining process."""
        return self.joined_in_generation, self._joined, self._notes, self._n_losses

    def adopt(self, exported: tuple[Any, ...]) -> None:
        """Replace the state with what another process has exported."""
        since, self._joined, self._notes, self._n_losses = exported
        self._continue_with(since)

    def _continue_with(self, since: dict[int, int]) -> None:
        there, generation = Roster.of(self._world)
        self.joined_in_generation = since
        self._generation = generation if since == there else None
        self._engine.workers.change_members(self.places(since), ())
