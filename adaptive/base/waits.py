"""Records of what a thread waits for, read by the watchdog when the thread does not continue.

The stack of a thread that waits says nothing about the cause. So a thread that waits for long says here what for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Wait(Protocol):
    """What a thread waits for."""

    def words(self) -> str:
        """Return it in words: "waiting for example 12 of the data, which …". Asked from any thread."""
        ...

    def stack(self) -> str:
        """Return the Python stack of the thread or process that is waited for, or "". Asked from any thread."""
        ...


_waits: dict[int, Wait] = {}


@contextmanager
def waiting(wait: Wait) -> Iterator[None]:
    """Say what this thread waits for, while the block lasts."""
    ident = threading.get_ident()
    _waits[ident] = wait
    try:
        yield
    finally:
        del _waits[ident]


def wait_of(thread: int) -> Wait | None:
    """Return what the thread with this identifier waits for, if it has said so."""
    return _waits.get(thread)
