"""Records of what threads wait for, which their stacks do not show; for the watchdog."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Wait(Protocol):
    """Something that a thread waits for."""

    def words(self) -> str:
        """Return a description: "waiting for example 12 of the data, which …". Called from any thread."""
        ...

    def stack(self) -> str:
        """Return the Python stack of the thread or process that is waited for, or "". Called from any thread."""
        ...


_waits: dict[int, Wait] = {}


@contextmanager
def waiting(wait: Wait) -> Iterator[None]:
    """Record what this thread waits for, for the duration of the block."""
    ident = threading.get_ident()
    _waits[ident] = wait
    try:
        yield
    finally:
        del _waits[ident]


def wait_of(thread: int) -> Wait | None:
    """Return what the thread with this identifier waits for, or `None` if it has not recorded anything."""
    return _waits.get(thread)
