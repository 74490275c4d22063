"""The current world: the world that this thread entered last, used where none is given.

It is a context variable, which other threads do not see. Code without a world runs as a single process, which is
refused in a job of several, since each would train a separate model.
"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token

from adaptive.base.errors import CollectiveError
from adaptive.base.process.launcher import launcher
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.world import World

current_world: ContextVar[World | None] = ContextVar("adaptive_world", default=None)
_entered: list[World] = []  # in this process, in whichever thread
_pid = 0  # of the process that entered the last one


def enter(world: World) -> Token[World | None]:
    """Make a world the current one of this thread, until `leave`. Return a token for `leave`."""
    global _pid
    _pid = os.getpid()
    _entered.append(world)
    return current_world.set(world)


def leave(world: World, token: Token[World | None]) -> None:
    """Restore the world that was current before `enter`."""
    _entered.remove(world)
    current_world.reset(token)


def check_not_forked() -> None:
    """Check that this process isn't a forked child of the one that entered the last world.

    Raises:
      CollectiveError: it is. Called before a collective uses JAX, which hangs in such a child.
    """
    if _entered and os.getpid() != _pid:
        raise CollectiveError(
            f"a collective is called{at(current_line())} in a forked child of process {_pid}, which has no connections "
            'of its own. Start the child as a new process:  multiprocessing.get_context("spawn")'
        )


def why_not_alone() -> str | None:
    """Return why code without a world must not run as a single process; `None` if it may, or has a world."""
    if current_world.get() is not None:
        return None
    if _entered:
        return f"{_entered[-1]!r} was entered in another thread, and is the current world of that thread only"
    started = launcher()
    if started is not None and (started.processes or 1) > 1:
        return f"{started.name} started {started.processes} processes, of which this is one"
    return None
