"""The numbers that a Python function carries with it: what a hook or a callback may know of the batch's shape.

What a driver computes is in its graph, where two traces can be compared. What its hooks and callbacks do is Python,
made anew in each trace; the numbers that they close over are all that can be compared of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np

_DEEP = 8  # objects within objects; a policy is three or four


def numbers_within(thing: Any) -> tuple:
    """Numbers and texts in a function's closure and defaults, a partial's arguments, an object's attributes."""
    return tuple(_within(thing, _DEEP, set()))


def _within(thing: Any, deep: int, seen: set[int]) -> Iterator[Any]:
    if isinstance(thing, bool | int | float | str | np.generic):
        yield thing
    elif deep and id(thing) not in seen:
        seen.add(id(thing))
        for part in _parts(thing):
            yield from _within(part, deep - 1, seen)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, FunctionType):
        yield from thing.__closure__ or ()
        yield from thing.__defaults__ or ()
        yield from (thing.__kwdefaults__ or {}).values()
    elif isinstance(thing, CellType):
        yield from _contents(thing)
    elif isinstance(thing, MethodType):
        yield thing.__self__
        yield thing.__func__
    elif isinstance(thing, functools.partial):
        yield thing.func
        yield from (*thing.args, *thing.keywords.values())
    elif isinstance(thing, tuple | list):
        yield from thing
    elif isinstance(thing, Mapping):
        yield from thing.values()
    elif not isinstance(thing, type) and hasattr(thing, "__dict__"):
        yield from vars(thing).values()
    for slot in getattr(type(thing), "__slots__", ()):
        yield getattr(thing, slot, None)


def _contents(cell: CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # nothing in it yet
        return
