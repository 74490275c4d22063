"""Functions to call when this process ends, however Python ends it.

`run_exit_hooks` calls them at the interpreter's exit, and before `os._exit`, which skips that exit.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import suppress

_kept: list[Callable[[], object]] = []
os.register_at_fork(after_in_child=_kept.clear)  # what is unwritten is the parent's


def register_exit_hook(do: Callable[[], object]) -> Callable[[], None]:
    """Call `do` when this process ends. Returns a function that unregisters it."""
    if not _kept:  # handlers run in reverse order: registered again, this one runs before those of the world
        atexit.unregister(run_exit_hooks)
        atexit.register(run_exit_hooks)
    _kept.append(do)

    def unregister() -> None:
        with suppress(ValueError):
            _kept.remove(do)

    return unregister


def run_exit_hooks() -> None:
    """Call all registered functions, the newest first, and unregister them. Errors are ignored."""
    while _kept:
        with suppress(Exception):
            _kept.pop()()
