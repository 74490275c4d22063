"""One example, a pytree of arrays and numbers: convert it to host arrays, compare it with the first one, stack it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.errors import DataError
from adaptive.base.values.arrays import GIVE_A_MASK, PAD_THEM, NotAnArrayError, on_host
from adaptive.base.values.tree_paths import leaf_names


def taken(tree: Any, root: str, rows: np.ndarray | None = None) -> Any:
    """Return the leaves of a pytree on the host, in JAX's width. Raises a DataError that names the first leaf, below
    `root`, that is no array of numbers; `rows` numbers the rows of its arrays.
    """
    try:
        return jax.tree.map(on_host, tree)
    except NotAnArrayError:  # names are computed only now, since they take longer than the conversion
        for name, leaf in zip(leaf_names(tree, root), jax.tree.leaves(tree), strict=True):
            try:
                on_host(leaf)
            except NotAnArrayError as error:
                raise DataError(error.about(name, rows)) from error
        raise


def first_taken(item: Any, root: str) -> Any:
    """Return a first example on the host. Raises a DataError if it has no arrays, or lists of numbers or text."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(item, is_leaf=_is_list_of_numbers):
        if _is_list_of_numbers(leaf):
            name = root + jax.tree_util.keystr(path)
            raise DataError(f"{name} is a list of numbers, which JAX takes for a pytree. Write  np.asarray(x)")
    row = taken(item, root)
    if not jax.tree.leaves(row):
        raise DataError(f"{root} has no arrays: {item!r}.")
    return row


def _is_list_of_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, int | float | complex | list) for x in value)


def checked(row: Any, first: Any, name: str, of: str = "example 0") -> Any:
    """Return an example if its leaves are like another one's. Else raise a DataError that names `name` and `of`."""
    if jax.tree.structure(row) != jax.tree.structure(first):
        raise DataError(
            f"{name} has the structure {jax.tree.structure(row)}, {of} has {jax.tree.structure(first)}. "
            f"If a value is missing: {GIVE_A_MASK}"
        )
    for number, (leaf, like) in enumerate(zip(jax.tree.leaves(row), jax.tree.leaves(first), strict=True)):
        if leaf.shape != like.shape or leaf.dtype != like.dtype:
            part = leaf_names(row, "example")[number]
            raise DataError(
                f"{part} of {name} is {leaf.dtype}{list(leaf.shape)}, of {of} {like.dtype}{list(like.shape)}. "
                + PAD_THEM * (leaf.shape != like.shape)
            )
    return row


def batch_of(items: Sequence[Any], numbers: Sequence[int], first: Any) -> Any:
    """Return examples as one batch. Raises a DataError with the number of the first one that is not like `first`."""
    likes, tree = jax.tree.flatten(first)
    try:  # in as few calls for each example as possible: in a reader process this takes the time of a short read
        batch = []
        for column in zip(*map(tree.flatten_up_to, items), strict=True):
            arrays = [leaf if type(leaf) is np.ndarray else on_host(leaf) for leaf in column]
            batch.append(on_host(np.stack(arrays, dtype=arrays[0].dtype, casting="no")))
        if all(b.shape[1:] == x.shape and b.dtype == x.dtype for b, x in zip(batch, likes, strict=True)):
            return tree.unflatten(batch)
    except (ValueError, TypeError):
        pass
    rows = []
    for item, number in zip(items, numbers, strict=True):
        name = f"example {number}"
        rows.append(checked(taken(item, name), first, name))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def joined(batches: Sequence[Any]) -> Any:
    """Concatenate batches."""
    return batches[0] if len(batches) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


class Functions(NamedTuple):
    """The functions `map=` and `random_map=`, which are applied to each example."""

    map: Callable[[Any], Any] | None = None
    random_map: Callable[[Any, np.random.Generator], Any] | None = None

    def applied(self, item: Any, index: int, epoch: int, seed: int, shard: int) -> Any:
        """Return an example after the functions. Its random numbers depend on neither the process nor the batch."""
        if self.map is not None:
            item = self.map(item)
        if self.random_map is not None:
            key = np.array([seed & (2**64 - 1), index], np.uint64)  # a list of such numbers becomes floats
            philox = np.random.Philox(key=key, counter=[0, 0, 1 + shard, epoch])
            item = self.random_map(item, np.random.Generator(philox))
        return item
