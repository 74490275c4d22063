"""Whether a world is open."""

from __future__ import annotations

import weakref
from typing import Any

from adaptive import CollectiveError
from adaptive.base.source_lines import at, current_line


class Lifetime:
    """Whether a world is open, and how it ends. Shared by the world, its transport and its channels.

    Args:
      world: the world, for error messages; held by a weak reference.

    Attributes:
      closed: whether the world can no longer be used by this process.
      leaving: whether the last `with` block of the world has ended.
      terminated: whether it ends because all processes received a termination signal.
      exit_reason: how the block was left other than at its end, for example "sys.exit()"; else "".
    """

    def __init__(self, world: Any):
        self._world = weakref.ref(world)
        self.closed = self.leaving = self.terminated = False
        self.exit_reason = ""

    def check_open(self) -> None:
        """Check that the world is open.

        Raises:
          CollectiveError: it is closed.
        """
        if self.closed:
            raise CollectiveError(
                f"{self.world_name} is used{at(current_line())} after it was closed. Use a world only inside its "
                "block:\n"
                "    with comm.world() as world:\n"
                "        program = ad.Program(..., world=world)"
            )

    @property
    def world_name(self) -> str:
        """The `repr` of the world."""
        return repr(self._world())
