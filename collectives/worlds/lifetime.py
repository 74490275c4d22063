"""Whether a world is open."""

from __future__ import annotations

import weakref
from typing import Any

from adaptive import CollectiveError
from adaptive.extend import at, current_line


class Lifetime:
    """Whether a world is open, and how it ends. Shared by the world, its transport and its channels.

    Args:
      world: named in errors; not kept alive.

    Attributes:
      closed: whether the world can no longer be used by this process.
      leaving: whether the last `with` block of the world has ended.
      terminated: whether it ends because all processes received a termination signal.
      exit_reason: how the block was left, if not at its end: "sys.exit()".
    """

    def __init__(self, world: Any):
        self._world = weakref.ref(world)
        self.closed = self.leaving = self.terminated = False
        self.exit_reason = ""

    def check_open(self) -> None:
        """Raise where the world is closed.

        Raises:
          CollectiveError: it is.
        """
        if self.closed:
            raise CollectiveError(
                f"{self.world_name} is closed, and is used again{at(current_line())}. Use a world only inside its "
                "block:\n"
                "    with comm.world() as world:\n"
                "        program = ad.Program(..., world=world)"
            )

    @property
    def world_name(self) -> str:
        """The `repr` of the world."""
        return repr(self._world())
