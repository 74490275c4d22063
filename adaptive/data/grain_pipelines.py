"""Pipelines of grain, recognized by the names of their classes, so that grain is not imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from adaptive.base.errors import DataError

_BATCHES = {"BatchMapDataset", "BatchIterDataset", "RebatchIterDataset"}
_BATCH_OPERATIONS = {"BatchOperation", "PackAndBatchOperation"}  # of grain's older DataLoader
_WITH_GAPS = {"FilterMapDataset": "filter", "FlatMapMapDataset": "flat_map"}  # return None at some indices
# The elements of these consist of parts of their parents' elements, so parents that batch do not make these batches.
_REGROUPING = ("FlatMap", "Pack", "ConcatThenSplit", "Rebatch")


def batches_of(data: Any) -> str:
    """Return the operation of a grain pipeline that makes batches, as text; "" if there is none, or it is unknown."""
    for node in _nodes(data):
        kind = type(node).__name__
        operation = getattr(node, "operation", None)
        if kind in _BATCHES or _BATCH_OPERATIONS & {c.__name__ for c in type(operation).__mro__}:
            return "Batch(…) in its operations" if _is_loader(data) else ".batch(…)"
    return ""


def check_has_index(data: Any) -> None:
    """Raise if a `grain.MapDataset` has no example at some of its indices.

    Raises:
      DataError: the data set has `.filter()`, or another operation that leaves gaps.
    """
    for node in _nodes(data):
        method = _WITH_GAPS.get(type(node).__name__)
        if method:
            raise DataError(
                f"a MapDataset with .{method}() has no example at some of its indices. Iterate over it instead, "
                "which skips these:  data.to_iter_dataset()"
            )


def shards_of(data: Any) -> int:
    """Return the number of parts into which a `grain.DataLoader` divides its data set; it yields one of them."""
    return int(getattr(getattr(data, "_shard_options", None), "shard_count", 1)) if _is_loader(data) else 1


def _is_loader(data: Any) -> bool:
    return module_of(data) == "grain" and type(data).__name__ == "DataLoader"


def _nodes(data: Any) -> Iterator[Any]:
    """Yield a pipeline's data set and its ancestors, as far as each element is an element of the ancestor."""
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
    """Return the data sets that an `InterleaveIterDataset` interleaves; only the first if they come from a data set."""
    if type(node).__name__ != "InterleaveIterDataset":
        return []
    found = getattr(node, "_datasets", ())
    try:
        return list(found) if isinstance(found, list | tuple) else [found[0]]
    except Exception:  # raised by user code, which will raise again when the data set is iterated
        return []


def module_of(data: Any) -> str:
    """Return the name of the package that defines the type of `data`; "" if that package is not imported."""
    package = type(data).__module__.partition(".")[0]
    return package if package in sys.modules else ""
