"""What is still to be done when this process ends, on whichever way it does that is left to Python.

Who keeps something that others would miss (lines that are not written yet) says so here. It is asked at the end of the
interpreter, and by whoever ends this process with no such end (`os._exit`).
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import suppress

_kept: list[Callable[[], object]] = []


def at_the_end(do: Callable[[], object]) -> Callable[[], None]:
    """Have `do` called when this process ends. Returns what takes that back."""
    if not _kept:  # the exit handlers of today are called before those of the world, which was made before
        atexit.unregister(last_words)
        atexit.register(last_words)
    _kept.append(do)

    def no_more() -> None:
        with suppress(ValueError):
            _kept.remove(do)

    return no_more


def last_words() -> None:
    """Do what is still to be done. What fails at that is left."""
    while _kept:
        with suppress(Exception):
            _kept.pop()()
