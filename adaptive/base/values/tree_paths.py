"""Pytrees by the paths of their leaves, which stay the same in libraries that store other containers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from adaptive.base.errors import CheckpointError

Name = tuple[str, ...]  # of a leaf: attributes, keys and indices on the way to it, as text


def leaf_names(tree: Any, root: str) -> tuple[str, ...]:
    """Return the path of every leaf: `state.params['kernel']`."""
    return tuple(root + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


class Leaf(NamedTuple):
    """A leaf with its path as Python writes it: `state.params['kernel']`."""

    label: str
    value: Any


def by_name(tree: Any, root: str) -> dict[Name, Leaf]:
    """Return the leaves of a tree by path, in the order of the tree.

    Raises:
      CheckpointError: two leaves have one name, such as those at the keys 1 and "1".
    """
    found: dict[Name, Leaf] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        name, label = tuple(map(_part, path)), root + jax.tree_util.keystr(path)
        if name in found:
            raise CheckpointError(
                f"{found[name].label} and {label} have the same path in a checkpoint. Rename one of them."
            )
        found[name] = Leaf(label, value)
    return found


def _part(key: Any) -> str:
    """Return a dict's key, a sequence's index or an attribute's name as text."""
    for kind in ("key", "idx", "name"):
        if hasattr(key, kind):
            return str(getattr(key, kind))
    return str(key)
