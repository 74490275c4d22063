"""Warn if user code forks the training process, which holds MPI, XLA and many threads."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("adaptive")
_here = threading.local()
_said = threading.Event()


def warns_of_forks(function: F) -> F:
    """Decorate a function that runs user code, so that the first fork in its thread logs a warning.

    Starting another program (`subprocess`, spawn, forkserver, loky) does not count: its child runs no code of this
    process.
    """
    _watch()

    @functools.wraps(function)
    def watched(*args: Any, **options: Any) -> Any:
        _here.runs = True
        try:
            return function(*args, **options)
        finally:
            _here.runs = False

    return watched  # type: ignore[return-value]


@functools.cache
def _watch() -> None:
    os.register_at_fork(before=_before)


def _before() -> None:
    if getattr(_here, "runs", False) and not _said.is_set():
        _said.set()
        _log.warning(
            "the iterator starts a process by os.fork(), as multiprocessing does by default. The training process "
            "holds MPI, XLA and threads, which a fork does not survive: the new process may hang or crash. Start it by "
            "multiprocessing.get_context('forkserver') or ('spawn'), by subprocess, or by loky."
        )
