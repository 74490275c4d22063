"""Trees by the names of their leaves: two that hold the same are alike, whatever they are made of.

A library that stores pytrees gives back other containers than it was given: of a `NamedTuple` or a dataclass a dict,
sorted by name, of a tuple a list, of keys that are numbers text. What stays is what each leaf is called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from .errors import CheckpointError

Name = tuple[str, ...]  # of a leaf: attributes, keys and indices on the way to it, as text


def leaf_names(tree: Any, root: str) -> tuple[str, ...]:
    """`state.params['kernel']` for every leaf."""
    return tuple(root + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


class Leaf(NamedTuple):
    """A leaf, and how one would write it: `state.params['kernel']`."""

    label: str
    value: Any


def by_name(tree: Any, root: str) -> dict[Name, Leaf]:
    """The leaves of a tree, in the order of the tree.

    Raises:
      CheckpointError: two leaves have one name, such as those at the keys 1 and "1".
    """
    found: dict[Name, Leaf] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        name, label = tuple(map(_part, path)), root + jax.tree_util.keystr(path)
        if name in found:
            raise CheckpointError(
                f"{found[name].label} and {label} have one name as soon as they are stored, so that one could be taken "
                "for the other. Rename one of them."
            )
        found[name] = Leaf(label, value)
    return found


def _part(key: Any) -> str:
    """Of a dict's key, a sequence's index, or an attribute."""
    for kind in ("key", "idx", "name"):
        if hasattr(key, kind):
            return str(getattr(key, kind))
    return str(key)
