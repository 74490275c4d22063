"""Changes of membership in code that communicates: members, ranks and the number of processes may change in any
collective. Code compares later (`Roster`), or repeats its work (`with_same_members`, `broadcast_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from .world import World

T = TypeVar("T")


class Roster(NamedTuple):
    """The members of a world at one moment. Replicated.

    Attributes:
      joined_in_generation: for each member's worker slot, the generation in which the member joined.
      generation: of the world at that moment.
    """

    joined_in_generation: dict[int, int]
    generation: int

    @staticmethod
    def of(world: World) -> Roster:
        """Return the current members."""
        return Roster(dict(zip(world.members, world.joined_in_generation, strict=True)), world.generation)

    @property
    def members(self) -> tuple[int, ...]:
        """The occupied worker slots, in order."""
        return tuple(self.joined_in_generation)


def with_same_members(world: World, work: Callable[[], T]) -> T:
    """Return the result of `work`; repeat it if members left or joined meanwhile.

    Args:
      work: a function that communicates and depends on the members. Called on every process.
    """
    while True:
        generation = world.generation
        result = work()
        if world.generation == generation:
            return result


def broadcast_bytes(world: World, make: Callable[[], bytes], about: str) -> bytes:
    """Return bytes from the process with rank 0, on every process. Communicates. If it is lost before, the next one
    with rank 0 sends its own.

    Args:
      make: returns the bytes. Called on the process with rank 0 only; its errors are raised there.
      about: the operation, for errors.
    """
    while True:
        own = b"" if world.rank else b"+" + make()
        for sent in world.all_gather_bytes(own, about):
            if sent:
                return sent[1:]
