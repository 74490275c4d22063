"""A data set, as users give it: arrays with a row per example, a source of examples, or a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from adaptive.base.arrays import NotAnArrayError, is_array, on_host
from adaptive.base.errors import DataError
from adaptive.base.names import leaf_names

_SHOWN = 8  # leaves of a data set that an error lists


@runtime_checkable
class RandomAccess(Protocol):
    """A grain-like source: `source[i]` is one example, a pytree of arrays and numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class ShardRange(NamedTuple):
    """Rows of a data set that are gone through once per epoch: `length` of them from number `start` on."""

    start: int
    length: int


class Rows(Protocol):
    """A data set, as the program reads it: rows by their numbers. `Examples`, or the `Shards` made of several."""

    length: int
    example: Any  # one row, on the host
    shard_ranges: tuple[ShardRange, ...]  # one that all workers share, or one for each worker

    @property
    def in_memory(self) -> bool:
        """Whether rows are read without a source's code."""
        ...

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> Any:
        """The examples numbered `indices`, stacked."""
        ...

    def shapes(self, examples: int) -> Any:
        """A batch of that many examples, as shapes."""
        ...


class Examples:
    """A data set: rows by their numbers.

    Args:
      data: a pytree of arrays with one leading axis; or a `RandomAccess` source; or a list of examples that are built
        alike, which are stacked. A list that may be a pytree of arrays as well is refused; a tuple is one always.

    Raises:
      DataError: leaves of different lengths, no leaves, no examples, leaves that hold no numbers, or a list or an
        object of which it cannot be told what is meant.
    """

    def __init__(self, data: Any):
        self._source = data if _is_source(data) else None
        if self._source is not None:
            self.length = len(self._source)
            if self.length == 0:
                raise DataError("the data set is empty: len(data) is 0.")
            self.example = _taken(self._source[0], "data[0]")
        else:
            arrays = _taken(_stacked(data), "data")
            self.length = _check_columns(data, arrays)
            self.example = jax.tree.map(lambda a: a[0], arrays)
            self._columns, self._tree = jax.tree.flatten(arrays)
        self.shard_ranges: tuple[ShardRange, ...] = (ShardRange(0, self.length),)

    def __len__(self) -> int:
        return self.length

    @property
    def in_memory(self) -> bool:
        return self._source is None

    def rows(self, indices: np.ndarray) -> Any:
        """The examples numbered `indices`, stacked."""
        if self._source is None:
            return self._tree.unflatten([column[indices] for column in self._columns])
        rows = (self._row(self._source, int(i)) for i in indices)
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

    def _row(self, source: RandomAccess, index: int) -> Any:
        row = _taken(source[index], f"data[{index}]")
        if jax.tree.structure(row) != jax.tree.structure(self.example):
            raise DataError(
                f"example {index} is built as {jax.tree.structure(row)}, "
                f"example 0 as {jax.tree.structure(self.example)}."
            )
        for number, (leaf, first) in enumerate(zip(jax.tree.leaves(row), jax.tree.leaves(self.example), strict=True)):
            if leaf.shape != first.shape or leaf.dtype != first.dtype:
                name = leaf_names(row, "example")[number]
                if leaf.shape != first.shape:
                    raise DataError(f"{name} of example {index} has shape {leaf.shape}, of example 0 {first.shape}.")
                raise DataError(f"{name} of example {index} is {leaf.dtype}, of example 0 {first.dtype}.")
        return row

    def shapes(self, examples: int) -> Any:
        """A batch of that many examples, as shapes."""
        return shapes_of(self.example, examples)


def shapes_of(example: Any, examples: int) -> Any:
    """A batch of examples like this one, as shapes."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((examples, *a.shape), jax.dtypes.canonicalize_dtype(a.dtype)), example
    )


def _taken(tree: Any, root: str) -> Any:
    """All leaves on the host, or an error that names the first that cannot be."""
    try:
        return jax.tree.map(on_host, tree)
    except NotAnArrayError:  # names take longer than rows
        for name, leaf in zip(leaf_names(tree, root), jax.tree.leaves(tree), strict=True):
            try:
                on_host(leaf)
            except NotAnArrayError as error:
                raise DataError(f"{name} {error}") from error
        raise


# --- what it is that was given ----------------------------------------------------------------------------------------


def _is_source(data: Any) -> bool:
    """Whether rows are read one by one, as `data[i]`."""
    if isinstance(data, list | tuple) or is_array(data):
        return False
    known = not jax.tree_util.all_leaves([data])  # to JAX, as a pytree
    if isinstance(data, Mapping):
        if not known:
            raise DataError(f"data is a {type(data).__name__}, which JAX takes for a single leaf. Give dict(data).")
        return False
    return isinstance(data, RandomAccess) and not (known and _rows_are_of_columns(data))


def _rows_are_of_columns(data: Any) -> bool:
    """Whether an object that is a source and a pytree is the same data set either way. Refused if it is two."""
    arrays = _taken(data, "data")
    shapes = [a.shape for a in jax.tree.leaves(arrays)]
    if not shapes or any(s[:1] != (len(data),) for s in shapes):
        return False
    for index in {0, len(data) - 1} if len(data) else ():
        row, other = jax.tree.map(lambda a, i=index: a[i], arrays), _taken(data[index], f"data[{index}]")
        if jax.tree.structure(row) != jax.tree.structure(other) or not jax.tree.all(
            jax.tree.map(np.array_equal, row, other)
        ):
            raise DataError(
                f"data is a {type(data).__name__}, a pytree of arrays and a source at once, and its data[{index}] is "
                "not what stands in the arrays. Say which it is:\n"
                "    vars(data)                                 its arrays, with a row per example\n"
                "    [data[i] for i in range(len(data))]        its examples, read once"
            )
    return True


def _stacked(data: Any) -> Any:
    """A list of examples as arrays; all else as it is.

    Raises:
      DataError: a list that may be a pytree of arrays just as well.
    """
    if not isinstance(data, list) or not _are_alike(data):
        return data
    length = _common_length(data)
    if length is not None:
        n, kind = len(data), type(data[0]).__name__
        raise DataError(
            f"data is a list of {n} of {kind} that are built alike, and their arrays have a common leading axis of "
            f"{length}: it may be {n} examples, or arrays of {length} examples. Say which:\n"
            f"    jax.tree.map(lambda *xs: np.stack(xs), *data)     {n} examples\n"
            f"    tuple(data)                                       arrays of {length} examples each\n"
            f"    ad.Shards(data)                                   {length} examples for each of {n} workers"
        )
    nested = [x for x in jax.tree.leaves(data[0], is_leaf=_is_list) if _is_list(x)]
    if any(np.ndim(x) == 0 for numbers in nested for x in jax.tree.leaves(numbers)):
        raise DataError(
            f"data[0] is {_brief(data[0])}: JAX takes a Python list for a pytree of its items, and not for an array. "
            "Make arrays of them:  np.asarray(data), where all is numbers, or of the lists in each example."
        )
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(_taken(x, f"data[{i}]") for i, x in enumerate(data)))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _are_alike(items: Any) -> bool:
    """Whether a list's items, two or more, have the same structure and shapes."""
    if len(items) < 2 or not jax.tree.leaves(items[0]):
        return False
    tree, shapes = jax.tree.structure(items[0]), _shapes(items[0])
    return all(jax.tree.structure(item) == tree and _shapes(item) == shapes for item in items[1:])


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(tree)]


def _common_length(tree: Any) -> int | None:
    """The length of the leading axis that all leaves have, if they do."""
    lengths = {shape[0] if shape else None for shape in _shapes(tree)}
    return lengths.pop() if len(lengths) == 1 else None


def _check_columns(data: Any, arrays: Any) -> int:
    """The number of examples."""
    names, leaves = leaf_names(arrays, "data"), jax.tree.leaves(arrays)
    if not leaves:
        raise DataError(f"the data set has no arrays: {arrays!r}. Give a pytree of arrays with one leading axis.")
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.ndim == 0:
            raise DataError(
                f"{name} is a single number; every leaf needs a leading axis, one row per example.{_advice(data)}"
            )
    lengths = [leaf.shape[0] for leaf in leaves]
    if len(set(lengths)) > 1:
        odd = next(i for i, length in enumerate(lengths) if length != lengths[0])
        shown = sorted({*range(min(_SHOWN, len(names))), odd})
        listed = ", ".join(f"{names[i]}: {lengths[i]}" for i in shown) + ", …" * (len(shown) < len(names))
        raise DataError(f"the data set's leaves have different numbers of examples: {listed}.{_advice(data)}")
    if lengths[0] == 0:
        raise DataError(f"the data set is empty: {names[0]} has shape {leaves[0].shape}.")
    return lengths[0]


def _advice(data: Any) -> str:
    """What may have been meant by what is no pytree of arrays with one leading axis."""
    items = data if isinstance(data, list | tuple) else ()
    if len(items) > 1 and len({jax.tree.structure(item) for item in items}) == 1:
        if _are_alike(items):
            return "\nIf these are examples, stack them:  jax.tree.map(lambda *xs: np.stack(xs), *data)"
        return "\nIf these are examples, they must have the same shapes: pad them, and give a mask beside."
    lists = [found for found in jax.tree.leaves(data, is_leaf=_is_list) if _is_list(found)]
    if any(np.ndim(x) == 0 for x in jax.tree.leaves(lists)):
        return "\nJAX takes a Python list for a pytree of its items. Make an array of it:  np.asarray(x)"
    return ""


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
