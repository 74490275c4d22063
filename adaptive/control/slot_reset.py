"""Reset the part of a hook's state that belongs to a worker slot, when the slot gets a new worker.

The workers' axis of each leaf is found by comparing the state for n workers with that for n + 1: it is the longer axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def reset_slots(state: Any, init: Callable[[int], Any], n_workers: int, slots: Sequence[int]) -> Any:
    """Return a hook's state in which nothing is known about the workers in these slots; the rest is unchanged.

    Args:
      init: the hook's `init(n_workers) -> state`. If the state's structure depends on the number of workers, or a leaf
        has several axes of workers, the whole state is reset.
    """
    first, larger = init(n_workers), init(n_workers + 1)
    leaves, tree = jax.tree.flatten(first)
    others = jax.tree.leaves(larger)
    if jax.tree.structure(larger) != tree:
        return first
    shapes = [(np.shape(a), np.shape(b)) for a, b in zip(leaves, others, strict=True)]
    if any(len(a) != len(b) or sum(x != y for x, y in zip(a, b, strict=True)) > 1 for a, b in shapes):
        return first
    axes = [next((axis for axis, n in enumerate(a) if n != b[axis]), None) for a, b in shapes]
    pairs = zip(jax.tree.leaves(state), leaves, axes, strict=True)
    return jax.tree.unflatten(tree, [_with_rows(old, new, axis, slots) for old, new, axis in pairs])


def _with_rows(old: Any, new: Any, axis: int | None, slots: Sequence[int]) -> Any:
    if axis is None:
        return old
    at: tuple[Any, ...] = (slice(None),) * axis + (list(slots),)
    changed = np.array(old)
    changed[at] = np.asarray(new)[at]
    return changed if isinstance(old, np.ndarray) else jax.numpy.asarray(changed)
