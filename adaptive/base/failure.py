"""What one process finds wrong, all processes hear of, whatever they are doing.

The others wait in some collective for this process, and which one it is need not be known: a world tells them in
whatever collective they are, or come to next (`World.fail`). They may also never come, so a process that fails does not
wait for ever: an error that nobody sees is worse than one that only its process reports.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from .errors import DisagreementError, NonFiniteError, WorkerError
from .phases import phase
from .world import World

QUIET_SECONDS = 0.5  # most often all are there, and an error need not be printed twice
PATIENCE_SECONDS = 30.0  # how long a process that fails waits for the others to hear of it
FAILURE_THREAD = "adaptive-failure"

_log = logging.getLogger("adaptive")
P = ParamSpec("P")
R = TypeVar("R")


class Member(Protocol):
    """Something that lives in a world under a name."""

    world: World
    _name: str


def heard_by_all(doing: str) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """For methods of a `Member` that other processes call too: if one raises, all processes hear of it.

    Args:
      doing: what the method does, in words: "in evaluate of".
    """

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        phase(doing.removesuffix(" of"))(method)

        @wraps(method)
        def heard(self: Member, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                if hasattr(self, "_name"):  # else it has no world yet
                    tell(self.world, f"{doing} {self._name}", error)
                raise

        return heard

    return decorate


def tell(world: World, where: str, error: BaseException, *, known: bool | None = None) -> None:
    """Tell the other processes that this one has failed, unless they know. Returns when they do, or do not listen.

    Args:
      where: "in step 4 of program 1 ('train')".
      known: whether they know; by default, as the error's kind says.
    """
    if world.processes == 1 or (is_known(error) if known is None else known):
        return
    with suppress(AttributeError):
        error._is_known = True  # type: ignore[attr-defined]
    first = str(error).split("\n", maxsplit=1)[0][:200]
    what = f"{where}: {type(error).__name__}{': ' * bool(first)}{first}"

    def send() -> None:
        with suppress(Exception):
            world.fail(what)

    sender = threading.Thread(target=send, name=FAILURE_THREAD, daemon=True)
    sender.start()
    sender.join(QUIET_SECONDS)
    if sender.is_alive():
        patience = f"up to {PATIENCE_SECONDS:g} s for the other ranks to hear of it"
        _log.error("rank %d failed %s\nIt waits %s.", world.rank, what, patience)
        sender.join(PATIENCE_SECONDS)


def is_known(error: BaseException) -> bool:
    """Whether all processes know of it: it was read off what all of them got, or has been told."""
    told = getattr(error, "_is_known", False)
    return told or isinstance(error, WorkerError | DisagreementError | NonFiniteError)
