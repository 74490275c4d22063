"""What a thread is doing, in words, read off its frames when somebody asks: while all is well it costs nothing.

Functions of the library that are worth a word are marked with it once, when they are defined; a look at a thread walks
its frames and picks the words up.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, TypeVar

from .where import library_folders

F = TypeVar("F", bound=Callable[..., Any])

_JAX_COMPILES = os.path.join("jax", "_src", "compiler.py")  # what a user's own jax.jit is compiled in, too
_words: dict[CodeType, str] = {}
_compiling: set[CodeType] = set()
_exchanging: set[CodeType] = set()


@dataclass(frozen=True)
class Doing:
    """What a thread is doing.

    Attributes:
      words: of the marked functions it is in, the innermost first; none in the user's own code between steps.
      line: `train.py:17`, the innermost of the user's files; "" where none is known.
      compiles: whether it waits for XLA's compiler.
      exchanges: whether it is in a collective.
    """

    words: tuple[str, ...]
    line: str
    compiles: bool
    exchanges: bool

    def __str__(self) -> str:
        return ", ".join(self.words) or "in the script's own code, between steps"


def phase(words: str, *, compiles: bool = False, exchanges: bool = False) -> Callable[[F], F]:
    """Mark a function with what a thread in it is doing: "in evaluate". Returns the function itself.

    Args:
      compiles: it waits for XLA's compiler, which takes as long as it takes.
      exchanges: it is in a collective.
    """

    def mark(function: F) -> F:
        code = function.__code__
        _words[code] = words
        if compiles:
            _compiling.add(code)
        if exchanges:
            _exchanging.add(code)
        return function

    return mark


def doing(frame: FrameType | None) -> Doing:
    """What the thread with this innermost frame is doing."""
    words: dict[str, None] = {}
    line, compiles, exchanges = "", False, False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_JAX_COMPILES):
            compiles = True
            words.setdefault("compiling")
        if code in _words:
            words.setdefault(_words[code])
            compiles |= code in _compiling
            exchanges |= code in _exchanging
        if not line and not code.co_filename.startswith(_not_the_users()):
            line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return Doing(tuple(words), line, compiles, exchanges)


@lru_cache(maxsize=1)
def _not_the_users() -> tuple[str, ...]:
    """How the names of files begin that are not the user's: of this library, Python's, and what is installed."""
    paths = sysconfig.get_paths()
    folders = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*library_folders(), *(os.path.join(folder, "") for folder in folders), "<frozen")
