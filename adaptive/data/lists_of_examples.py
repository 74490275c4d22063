"""Lists as data: a list of examples is stacked into arrays; one that may also be a pytree of arrays is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.arrays import PAD_THEM, on_host
from adaptive.base.errors import DataError
from adaptive.base.tree_paths import leaf_names

from .one_example import check_shapes, has_lists, narrowing_notes, taken, with_arrays


class Stacked(NamedTuple):
    """Data as a pytree of arrays.

    Attributes:
      arrays: the pytree.
      notes: notes on dtypes that stacking has narrowed.
    """

    arrays: Any
    notes: tuple[str, ...] = ()


def stack_list(data: Any) -> Stacked:
    """Stack a list of examples into arrays with a row per example; return other data unchanged.

    Raises:
      DataError: the list may also be a pytree of arrays; or the examples differ in structure.
    """
    if not isinstance(data, list) or not data:
        return Stacked(data)
    if all(isinstance(item, Mapping) for item in data) or (not isinstance(data[0], list) and has_lists(data[0])):
        return _stack([with_arrays(item, f"data[{i}]") for i, item in enumerate(data)])
    if not _are_alike(data):
        return Stacked(data)
    length = _common_length(data)
    if length is not None:
        n, kind = len(data), type(data[0]).__name__
        raise DataError(
            f"data is a list of {n} of {kind} of one structure, whose arrays have a common leading axis of "
            f"{length}: it may be {n} examples, or arrays of {length} examples. Say which:\n"
            f"    jax.tree.map(lambda *xs: np.stack(xs), *data)     {n} examples\n"
            f"    tuple(data)                                       arrays of {length} examples each\n"
            f"    ad.Shards(data)                                   {length} examples for each of {n} workers"
        )
    if isinstance(data[0], list) and has_lists(data[0]):
        raise DataError(
            f"data[0] is {_brief(data[0])}: data may be a list of {len(data)} examples, or of {len(data)} columns. Say "
            "which:  np.asarray(data), or tuple(map(np.asarray, data))."
        )
    return _stack(data)


def advice_on_lists(data: Any) -> str:
    """Return advice for an error on data that are not a pytree of arrays with a common leading axis, or ""."""
    items = data if isinstance(data, list | tuple) else ()
    if len(items) > 1 and len({jax.tree.structure(item) for item in items}) == 1:
        if _are_alike(items):
            return "\nIf these are examples, stack them:  jax.tree.map(lambda *xs: np.stack(xs), *data)"
        return f"\nIf these are examples: {PAD_THEM}"
    lists = [found for found in jax.tree.leaves(data, is_leaf=_is_list) if _is_list(found)]
    if any(np.ndim(x) == 0 for x in jax.tree.leaves(lists)):
        return "\nJAX takes a Python list for a pytree of its items. Make an array of it:  np.asarray(x)"
    return ""


def _stack(items: list[Any]) -> Stacked:
    """Stack examples, after comparing each with the first one."""
    rows = [taken(item, f"data[{i}]") for i, item in enumerate(items)]
    for number, row in enumerate(rows):
        check_shapes(row, rows[0], f"example {number}")
    names = leaf_names(rows[0], "")
    leaves = zip(*map(jax.tree.leaves, rows), strict=True)
    stacked = [_stack_leaves(column, name) for column, name in zip(leaves, names, strict=True)]
    return Stacked(jax.tree.structure(rows[0]).unflatten(stacked), narrowing_notes(items[0], "data[i]"))


def _stack_leaves(column: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Stack one leaf of all examples; shape=(examples, …).

    Raises:
      DataError: some leaves are integers that do not fit the float dtype of the others.
    """
    array = on_host(np.stack(column))
    if array.dtype.kind in "fc" and len({leaf.dtype for leaf in column}) > 1:
        for number, (leaf, row) in enumerate(zip(column, array, strict=True)):
            if leaf.dtype.kind in "iu" and not np.array_equal(row.astype(np.float64), leaf.astype(np.float64)):
                raise DataError(
                    f"data[{number}]{name} holds {_brief(leaf.tolist())}, which {array.dtype} rounds; other examples "
                    "hold floats there. Make all of them integers, or all floats."
                )
    return array


def _are_alike(items: Any) -> bool:
    """Return whether a list has two or more items, all of the same structure and shapes."""
    if len(items) < 2 or not jax.tree.leaves(items[0]):
        return False
    tree, shapes = jax.tree.structure(items[0]), _shapes(items[0])
    return all(jax.tree.structure(item) == tree and _shapes(item) == shapes for item in items[1:])


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _common_length(tree: Any) -> int | None:
    """Return the common length of the leading axis of all leaves, or None."""
    lengths = {shape[0] if shape else None for shape in _shapes(tree)}
    return lengths.pop() if len(lengths) == 1 else None


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
