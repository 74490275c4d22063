"""Trees as a library that stores them by the names of their leaves gives them back.

What `orbax.checkpoint.StandardCheckpointer` (0.12) returns, if it does not get the original structure.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def stored(tree: Any) -> Any:
    """Attributes and keys become the keys of a dict, as text and sorted; sequences become lists. Python's numbers stay;
    numpy's scalars become arrays. There is no room for arrays of size zero."""
    if tree is None or (isinstance(tree, tuple | list | dict) and not tree):
        return None if hasattr(tree, "_fields") else tree
    if isinstance(tree, np.ndarray | np.generic | jax.Array):
        if np.size(tree) == 0:
            raise ValueError("Cannot save arrays with zero size")
        return np.array(tree)
    if isinstance(tree, bool | int | float):
        return tree
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    names = [getattr(path[0], "key", getattr(path[0], "idx", getattr(path[0], "name", None))) for path, _ in children]
    values = [stored(child) for _, child in children]
    indexed = (jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey)
    if all(isinstance(path[0], indexed) for path, _ in children):
        return values
    return dict(sorted(zip(map(str, names), values, strict=True)))
