"""Data sets of grain, recognised by their classes' names, so that grain is not imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from adaptive.base.errors import DataError


def refuse_batches(data: Any) -> None:
    """Raise for a data set of grain's that gives batches."""
    for node in _chain(data):
        kind = type(node).__name__
        if kind in ("BatchMapDataset", "BatchIterDataset"):
            raise DataError(
                "the data set gives batches: leave out .batch(…), since the program makes batches of its own, whose "
                "sizes change. To have batches taken apart:  ad.data.from_iterator(data, batched=True)"
            )


def _chain(data: Any) -> Iterator[Any]:
    """A data set of grain's and those that it is made of, as long as each of its elements is one of its parent's."""
    node: Any = data
    while module_of(node) == "grain":
        yield node
        kind, parents = type(node).__name__, list(getattr(node, "parents", ()))
        if len(parents) != 1 or any(word in kind for word in ("FlatMap", "Rebatch", "Pack", "Unbatch")):
            return
        node = parents[0]


def module_of(data: Any) -> str:
    """The package that its type is of, if that has been imported."""
    package = type(data).__module__.partition(".")[0]
    return package if package in sys.modules else ""
