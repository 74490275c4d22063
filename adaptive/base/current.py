"""The world that things belong to which are given none: the one that was entered last, in this thread.

Which one that is, is a context variable, so a thread that is started inside a `with comm.world()` block does not see
it; and a script may have forgotten the block. Where there are other processes or another world, to go on alone would
train a model in each process and call it one, so it is refused.
"""

from __future__ import annotations

from contextvars import ContextVar, Token

from .launcher import launcher
from .world import World

current_world: ContextVar[World | None] = ContextVar("adaptive_world", default=None)
_entered: list[World] = []  # in this process, in whichever thread


def enter(world: World) -> Token[World | None]:
    """Make it the current world of this thread, until `leave`."""
    _entered.append(world)
    return current_world.set(world)


def leave(world: World, token: Token[World | None]) -> None:
    """The world that was current before is so again."""
    _entered.remove(world)
    current_world.reset(token)


def why_not_alone() -> str | None:
    """Why what has no world must not run as if this process were alone; `None` where it is, or has a world."""
    if current_world.get() is not None:
        return None
    if _entered:
        return f"{_entered[-1]!r} was entered in another thread, and its block holds for that one alone"
    started = launcher()
    if started is not None and (started.processes or 1) > 1:
        return f"{started.name} started {started.processes} processes, of which this is one"
    return None
