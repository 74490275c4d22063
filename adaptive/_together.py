"""What all processes do at once between two steps, such as restoring: none goes on before all have told how it went.

A process that fails tells the others instead of leaving them to wait for it, and what has to be the same on all is
compared before anyone relies on it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from ._agreement import compare
from ._errors import WorkerError
from ._world import World

T = TypeVar("T")


class _Told(NamedTuple):
    """What one process tells the others."""

    digests: dict[str, str]
    result: bytes
    error: str = ""


def together(world: World, what: str, work: Callable[[], tuple[dict[str, str], T]], advice: str) -> list[T]:
    """Do `work` on every process. Communicates.

    Args:
      what: what is being done: "restore".
      work: returns digests, by name, of what has to be equal on all processes; and a result.
      advice: what to do where it is not.

    Returns:
      Every process's result, by rank.

    Raises:
      Exception: what `work` raised here.
      WorkerError: it has raised on another process.
      DisagreementError: a digest is not the same everywhere. On every process.
    """
    try:
        digests, result = work()
    except Exception as error:
        with suppress(Exception):  # what has gone wrong here comes first
            world.share(pickle.dumps(_Told({}, b"", f"{type(error).__name__}: {error}")))
        raise
    told = _Told({"what all processes do at once": what, **digests}, pickle.dumps(result))
    everyone: list[_Told] = [pickle.loads(theirs) for theirs in world.share(pickle.dumps(told))]
    failed = [f"rank {rank} failed in {what}, with {t.error}" for rank, t in enumerate(everyone) if t.error]
    if failed:
        raise WorkerError("\n".join([*failed, "This process stops with it, and is as it was before."]))
    compare([t.digests for t in everyone], advice)
    return [pickle.loads(t.result) for t in everyone]
