"""Pipelines of grain, recognised by their classes' names, so that grain is not imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from adaptive.base.errors import DataError

_BATCHES = {"BatchMapDataset", "BatchIterDataset", "RebatchIterDataset"}
_BATCH_OPERATIONS = {"BatchOperation", "PackAndBatchOperation"}  # of a DataLoader, in grain's older form
_WITH_GAPS = {"FilterMapDataset": "filter", "FlatMapMapDataset": "flat_map"}  # give None in the place of an example
# The elements of these are made of parts of their parents' elements: what is batched above them, is not below.
_REGROUPING = ("FlatMap", "Pack", "ConcatThenSplit", "Rebatch")


def batches_of(data: Any) -> str:
    """Return which operation of a grain pipeline makes batches, as text; empty if none is known to."""
    for node in _nodes(data):
        kind = type(node).__name__
        operation = getattr(node, "operation", None)
        if kind in _BATCHES or _BATCH_OPERATIONS & {c.__name__ for c in type(operation).__mro__}:
            return "Batch(…) in its operations" if _is_loader(data) else ".batch(…)"
    return ""


def check_has_index(data: Any) -> None:
    """Raise if a `grain.MapDataset` has no example at some of its indices.

    Raises:
      DataError: it holds `.filter()`, or another operation that leaves gaps.
    """
    for node in _nodes(data):
        method = _WITH_GAPS.get(type(node).__name__)
        if method:
            raise DataError(
                f"a MapDataset with .{method}() has no example at some of its indices. Go through it in its order, "
                "where they are passed over: give data.to_iter_dataset()"
            )


def shards_of(data: Any) -> int:
    """Return into how many parts a `grain.DataLoader` divides its data set, of which it gives one."""
    return int(getattr(getattr(data, "_shard_options", None), "shard_count", 1)) if _is_loader(data) else 1


def _is_loader(data: Any) -> bool:
    return module_of(data) == "grain" and type(data).__name__ == "DataLoader"


def _nodes(data: Any) -> Iterator[Any]:
    """Yield a pipeline's data set and those that it is made of, as far as each element is one of theirs."""
    waiting = [getattr(data, "_dataset", data) if _is_loader(data) else data]
    while waiting:
        node = waiting.pop()
        if not any(c.__module__.partition(".")[0] == "grain" for c in type(node).__mro__):
            continue
        yield node
        if any(word in type(node).__name__ for word in _REGROUPING):
            continue
        waiting += [*getattr(node, "parents", ()), *_interleaved(node)]


def _interleaved(node: Any) -> list[Any]:
    """The data sets that an `InterleaveIterDataset` takes turns in; of those that a data set gives, the first."""
    if type(node).__name__ != "InterleaveIterDataset":
        return []
    found = getattr(node, "_datasets", ())
    try:
        return list(found) if isinstance(found, list | tuple) else [found[0]]
    except Exception:  # the user's function, which will raise where it is gone through
        return []


def module_of(data: Any) -> str:
    """The package that its type is of, if that has been imported."""
    package = type(data).__module__.partition(".")[0]
    return package if package in sys.modules else ""
