"""One example, a pytree of arrays and numbers: convert it to host arrays, compare it with the first one, stack it.

The examples of sources, iterators and lists follow one rule at any depth: a list of numbers, or of lists of numbers, is
an array, as in rows read from JSON; a list that holds arrays is a pytree of them. A table is a dict of its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adaptive.base.arrays import GIVE_A_MASK, PAD_THEM, NotAnArrayError, as_numpy, is_narrowed, on_host
from adaptive.base.errors import DataError
from adaptive.base.tree_paths import leaf_names

from .tables import arrays_of, is_tabular

_NAMED = 3  # largest number of leaves that a note lists


def has_lists(example: Any) -> bool:
    """Return whether an example holds lists of numbers or tables, which `with_arrays` converts."""
    return any(
        is_list_of_numbers(x) or is_tabular(x) or isinstance(x, Mapping)
        for x in jax.tree.leaves(example, is_leaf=is_list_of_numbers)
    )


def with_arrays(example: Any, root: str) -> Any:
    """Return an example with an array in place of each list of numbers, and a dict of columns in place of each table.

    Args:
      root: what to call the example in errors.

    Raises:
      DataError: a list is ragged or holds None, or a column of a table does not hold numbers.
    """
    try:
        return jax.tree.map(_as_arrays, example, is_leaf=is_list_of_numbers)
    except NotAnArrayError:  # names are computed only now, since they take longer than the conversion
        for path, leaf in jax.tree_util.tree_leaves_with_path(example, is_leaf=is_list_of_numbers):
            try:
                _as_arrays(leaf)
            except NotAnArrayError as error:
                raise DataError(error.about(root + jax.tree_util.keystr(path))) from error
        raise


def _as_arrays(leaf: Any) -> Any:
    if is_tabular(leaf):
        if type(leaf).__name__ == "Series" and len(getattr(leaf, "index", ())) and isinstance(leaf.index[0], str):
            raise NotAnArrayError(
                "is a row of a data frame, in which pandas gives all columns one dtype. Pass the data frame as data: "
                "then columns keep their dtypes."
            )
        return arrays_of(leaf)
    if isinstance(leaf, Mapping):  # a class that JAX does not know as a pytree
        return jax.tree.map(_as_arrays, dict(leaf), is_leaf=is_list_of_numbers)
    return array_of_list(leaf) if isinstance(leaf, list) else leaf


def array_of_list(numbers: list[Any]) -> np.ndarray:
    """Convert a list of numbers, or of lists of numbers, to an array in the width that JAX computes with.

    Raises:
      NotAnArrayError: inner lists have different lengths; or a number is missing or too large.
    """
    try:
        return on_host(np.asarray(numbers))
    except ValueError as error:
        if isinstance(error, NotAnArrayError):
            raise
        raise NotAnArrayError(f"is a list of lists of different lengths. {PAD_THEM}") from error


def is_list_of_numbers(value: Any) -> bool:
    """Return whether `value` is a list of numbers, or of lists or tuples of numbers to any depth. None counts as a
    number here, so that a later error can give its position.
    """
    return isinstance(value, list) and _holds_numbers(value)


def _holds_numbers(values: Any) -> bool:
    kinds = set(map(type, values))
    nested = kinds & {list, tuple}
    if not all(map(_is_number, kinds - nested)) or kinds == {type(None)}:
        return False
    return not nested or all(_holds_numbers(v) for v in values if isinstance(v, list | tuple))


def _is_number(kind: type) -> bool:
    if issubclass(kind, np.generic):
        return not issubclass(kind, np.flexible | np.datetime64 | np.timedelta64)
    return issubclass(kind, int | float | complex | type(None))


def taken(tree: Any, root: str) -> Any:
    """Return all leaves on the host, in the width that JAX computes with.

    Raises:
      DataError: a leaf is not an array of numbers; names the first such leaf.
    """
    try:
        return jax.tree.map(on_host, tree)
    except NotAnArrayError:  # names are computed only now, since they take longer than the conversion
        for name, leaf in zip(leaf_names(tree, root), jax.tree.leaves(tree), strict=True):
            try:
                on_host(leaf)
            except NotAnArrayError as error:
                raise DataError(error.about(name)) from error
        raise


def arrays_of_batch(batch: Any, name: str) -> Any:
    """Return a batch as a pytree of arrays with unchanged dtypes; lists and tables are converted as in examples.

    Args:
      batch: the batch.
      name: name of the batch, for errors.

    Raises:
      DataError: a leaf is not an array of numbers.
    """
    batch = with_arrays(batch, name) if has_lists(batch) else batch
    arrays = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        try:
            arrays.append(as_numpy(leaf))
        except NotAnArrayError as error:
            raise DataError(error.about(name + jax.tree_util.keystr(path))) from error
    return jax.tree.structure(batch).unflatten(arrays)


def narrowing_notes(tree: Any, root: str) -> tuple[str, ...]:
    """Return a note that names the leaves whose floats JAX narrows; () if there are none.

    Args:
      tree: the arrays as the user passed them.
      root: name of the tree in the note.
    """
    narrowed = [
        name for name, leaf in zip(leaf_names(tree, root), jax.tree.leaves(tree), strict=True) if is_narrowed(leaf)
    ]
    if not narrowed:
        return ()
    names = ", ".join(narrowed[:_NAMED]) + f" and {len(narrowed) - _NAMED} more" * (len(narrowed) > _NAMED)
    return (
        f"{names}: float64, computed with as float32, because JAX's x64 mode is off "
        "(jax.config.update('jax_enable_x64', True) turns it on).",
    )


def checked(row: Any, first: Any, name: str) -> Any:
    """Return an example after checking that it has the leaves, shapes and dtypes of the first one.

    Args:
      row: the example.
      first: the first example.
      name: name of the example, for the error.

    Raises:
      DataError: the example has other leaves, or a leaf has another shape or dtype.
    """
    check_shapes(row, first, name)
    for number, (leaf, like) in enumerate(zip(jax.tree.leaves(row), jax.tree.leaves(first), strict=True)):
        if leaf.dtype != like.dtype:
            part = leaf_names(row, "example")[number]
            raise DataError(f"{part} of {name} is {leaf.dtype}, of example 0 {like.dtype}.")
    return row


def check_shapes(row: Any, first: Any, name: str) -> None:
    """Raise if an example does not have the leaves and shapes of the first one.

    Args:
      row: the example.
      first: the first example.
      name: name of the example, for the error.

    Raises:
      DataError: the example has other leaves, or a leaf has another shape.
    """
    if jax.tree.structure(row) != jax.tree.structure(first):
        raise DataError(_other_leaves(row, first, name))
    for number, (leaf, like) in enumerate(zip(jax.tree.leaves(row), jax.tree.leaves(first), strict=True)):
        if leaf.shape != like.shape:
            part = leaf_names(row, "example")[number]
            raise DataError(f"{part} of {name} has shape {leaf.shape}, of example 0 {like.shape}. {PAD_THEM}")


def _other_leaves(row: Any, first: Any, name: str) -> str:
    """Return an error message on how an example's structure differs from the first one's."""
    if row is None or first is None:
        return f"{name} has the structure {jax.tree.structure(row)}, example 0 has {jax.tree.structure(first)}."
    here, there = _with_nones(row), _with_nones(first)
    for part, value in here.items():
        if value is None and there.get(part) is not None:
            return f"{part} of {name} is None, of example 0 an array. {GIVE_A_MASK}"
        if value is not None and part in there and there[part] is None:
            return f"{part} of {name} is an array, of example 0 None. {GIVE_A_MASK}"
    missing, more = [part for part in there if part not in here], [part for part in here if part not in there]
    if missing and not more:
        return f"{name} has no {', '.join(missing[:_NAMED])}, which example 0 has."
    if more and not missing:
        return f"{name} has {', '.join(more[:_NAMED])}, which example 0 does not have."
    return f"{name} has the structure {jax.tree.structure(row)}, example 0 has {jax.tree.structure(first)}."


def _with_nones(example: Any) -> dict[str, Any]:
    """Return the leaves of an example by name, including None."""
    named = jax.tree_util.tree_leaves_with_path(example, is_leaf=lambda x: x is None)
    return {"example" + jax.tree_util.keystr(path): leaf for path, leaf in named}


def stacked(rows: Sequence[Any]) -> Any:
    """Stack examples into one batch."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
