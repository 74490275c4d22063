"""Reset what hooks know of a worker when its worker slot gets a new one.

Nobody has to say which numbers of a state belong to which worker: a state for one worker more shows it. The axis that
is longer there is the workers'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np


def reset_slots(state: Any, init: Callable[[int], Any], n_workers: int, slots: Sequence[int]) -> Any:
    """Return a hook's state in which nothing is known about the workers in these slots; the rest is unchanged.

    Args:
      init: the hook's: `init(n_workers) -> state`. What does not depend on the number of workers is kept. A state whose
        structure does, or that has several axes of the workers in one leaf, begins anew as a whole.
    """
    first, larger = init(n_workers), init(n_workers + 1)
    leaves, tree = jax.tree.flatten(first)
    others = jax.tree.leaves(larger)
    if jax.tree.structure(larger) != tree:
        return first
    axes = [_longer(np.shape(a), np.shape(b)) for a, b in zip(leaves, others, strict=True)]
    if any(len(found) > 1 for found in axes):
        return first
    pairs = zip(jax.tree.leaves(state), leaves, axes, strict=True)
    return jax.tree.unflatten(tree, [_with_rows(old, new, found, slots) for old, new, found in pairs])


def _longer(shape: tuple[int, ...], larger: tuple[int, ...]) -> list[int]:
    """Return the axes whose lengths differ."""
    if len(shape) != len(larger):
        return [0, 1]  # it is no array of one number per worker
    return [axis for axis, (a, b) in enumerate(zip(shape, larger, strict=True)) if a != b]


def _with_rows(old: Any, new: Any, axes: Sequence[int], slots: Sequence[int]) -> Any:
    if not axes:
        return old
    at: tuple[Any, ...] = (slice(None),) * axes[0] + (list(slots),)
    changed = np.array(old)
    changed[at] = np.asarray(new)[at]
    return changed if isinstance(old, np.ndarray) else jax.numpy.asarray(changed)
