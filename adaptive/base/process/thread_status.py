"""A description of what a thread is doing: functions are marked with a text when they are defined, and a thread's
stack frames are read on demand, so that marks are free.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, TypeVar

from .source_lines import is_library, name_line

F = TypeVar("F", bound=Callable[..., Any])

IN_A_STEP = "in a step"  # of a thread that is in none of a step's other phases, such as its hooks
_JAX_COMPILES = os.path.join("jax", "_src", "compiler.py")  # also compiles the user's own jax.jit
_marks: dict[CodeType, tuple[str, bool, bool]] = {}  # of marked functions: words, compiles, exchanges


@dataclass(frozen=True)
class ThreadStatus:
    """A description of what a thread is doing.

    Attributes:
      words: texts of the marked functions on the stack, the innermost first; empty in the user's code between steps.
      line: `train.py:17`, the innermost line of the user's files; "" if unknown.
      compiles: whether it waits for XLA's compiler.
      exchanges: whether it is in a collective.
    """

    words: tuple[str, ...]
    line: str
    compiles: bool
    exchanges: bool

    def __str__(self) -> str:
        return ", ".join(self.words) or "in the script's own code, between steps"


def thread_status(words: str, *, compiles: bool = False, exchanges: bool = False) -> Callable[[F], F]:
    """Mark a function with what a thread inside it is doing: "in evaluate". The decorator returns the function itself.

    Args:
      compiles: whether the function waits for XLA's compiler, whose time has no bound.
      exchanges: whether the function is a collective.
    """

    def mark(function: F) -> F:
        _marks[function.__code__] = words, compiles, exchanges
        return function

    return mark


def thread_status_of(frame: FrameType | None) -> ThreadStatus:
    """Return what a thread is doing.

    Args:
      frame: the thread's innermost frame.
    """
    words: dict[str, None] = {}
    line, compiles, exchanges = "", False, False
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_JAX_COMPILES):
            compiles = True
            words.setdefault("compiling")
        if code in _marks:
            text, is_compiler, is_collective = _marks[code]
            words.setdefault(text)
            compiles |= is_compiler
            exchanges |= is_collective
        if not line and not is_library(code.co_filename):
            line = name_line(code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ThreadStatus(tuple(words), line, compiles, exchanges)
