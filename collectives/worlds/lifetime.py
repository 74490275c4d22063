"""Whether a world is open."""

from __future__ import annotations

import os
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

    In a forked child of this process the world is closed, because MPI, XLA and sockets belong to the parent.
    """

    def __init__(self, world: Any):
        self._world = weakref.ref(world)
        self.closed = self.leaving = self.terminated = False
        self.exit_reason = ""
        self._pid = os.getpid()
        _open.add(self)

    def check_open(self) -> None:
        """Check that the world is open.

        Raises:
          CollectiveError: it is closed, or this process is a forked child of the one that opened it.
        """
        if os.getpid() != self._pid:
            raise CollectiveError(
                f"the world of process {self._pid} is used{at(current_line())} in its forked child {os.getpid()}, "
                "which has no connections of its own. Let the child compute without the world and the program, or "
                'start it as a new process:  multiprocessing.get_context("spawn")'
            )
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


_open: weakref.WeakSet[Lifetime] = weakref.WeakSet()


def _close_in_child() -> None:
    for lifetime in _open:
        lifetime.closed = True


os.register_at_fork(after_in_child=_close_in_child)
