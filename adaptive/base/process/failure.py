"""Reporting one process's failure to all others, whatever they are doing.

`World.fail` makes the others raise in the collective that they are in or enter next. If they never enter one, the
failed process stops waiting after a limited time, so that its own error is shown.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from adaptive.base.errors import DisagreementError, NonFiniteError, WorkerError
from adaptive.base.world import World

from .thread_status import thread_status

QUIET_SECONDS = 0.5  # usually all processes are reachable, and the error need not be printed twice
PATIENCE_SECONDS = 30.0  # how long a failed process waits for the others to receive the report
FAILURE_THREAD = "adaptive-failure"

_log = logging.getLogger("adaptive")
P = ParamSpec("P")
R = TypeVar("R")


def fails_together(doing: str) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """Decorate a method that all processes call: if one raises, the error is reported to all. The method's object has a
    `world` and a `_name`. `doing`: "in evaluate of".
    """

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        thread_status(doing.removesuffix(" of"))(method)

        @wraps(method)
        def heard(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                if hasattr(self, "_name"):  # else it has no world yet
                    report_failure(self.world, f"{doing} {self._name}", error)
                raise

        return heard

    return decorate


def report_failure(world: World, where: str, error: BaseException) -> None:
    """Report to the other processes that this one has failed `where` ("in step 4 of program 1 ('train')"), unless they
    know. Returns when they have received the report, or after `PATIENCE_SECONDS`.
    """
    if world.processes == 1 or is_known(error):
        return
    with suppress(AttributeError):
        error.known_by_all = True  # type: ignore[attr-defined]
    first = str(error).split("\n", maxsplit=1)[0][:200]
    what = f"{where}: {type(error).__name__}{': ' * bool(first)}{first}"

    def send() -> None:
        with suppress(Exception):
            world.fail(what)

    sender = threading.Thread(target=send, name=FAILURE_THREAD, daemon=True)
    sender.start()
    sender.join(QUIET_SECONDS)
    if sender.is_alive():
        patience = f"up to {PATIENCE_SECONDS:g} s for the other ranks to receive this"
        _log.error("rank %d failed %s\nIt waits %s.", world.rank, what, patience)
        sender.join(PATIENCE_SECONDS)


def is_known(error: BaseException) -> bool:
    """Return whether all processes know of an error: all of them raise it, or it has been reported."""
    known = getattr(error, "known_by_all", False)
    return known or isinstance(error, WorkerError | DisagreementError | NonFiniteError)
