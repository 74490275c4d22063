"""What all processes do at once between two steps, such as restoring: what must be the same on all is compared before
anyone relies on it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

from adaptive.base.world import World

from .alike import compare

T = TypeVar("T")


def together(world: World, about: str, work: Callable[[], tuple[dict[str, str], T]], advice: str) -> list[T]:
    """Do `work` on every process. Communicates. Where it raises, the caller lets the others hear (`fails_together`).

    Args:
      about: what is being done, in words.
      work: returns digests, by name, of what has to be equal on all processes; and a result.
      advice: what to do where it is not.

    Returns:
      Every process's result, by rank.

    Raises:
      Exception: what `work` raised here.
      WorkerError: it has raised on another process.
      DisagreementError: a digest is not the same everywhere, or others do something else. On every process.
    """
    digests, result = work()
    told = pickle.dumps((digests, pickle.dumps(result)))  # what is compared must be readable before what is not
    everyone = [pickle.loads(theirs) for theirs in world.all_gather_bytes(told, about)]
    compare([theirs for theirs, _ in everyone], advice)
    return [pickle.loads(theirs) for _, theirs in everyone]
