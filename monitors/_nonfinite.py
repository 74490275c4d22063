"""How much of a gradient is not finite, where it is left out in silence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from adaptive.extend import assert_scope
from collectives import all_reduce


def nonfinite(grads: Any) -> jax.Array:
    """The share of examples whose contribution to a gradient is not finite: what `nonfinite="drop"` leaves out.

    A kernel call contributes one gradient for all its examples, so one example that overflows counts as all those of
    its call. Costs 4 bytes on the gradients' message.

    Args:
      grads: pytree; the mean gradient over this worker's examples. Local.

    Returns:
      A scalar of float32, from 0 to 1. Replicated.

    Raises:
      CollectiveError: when the program is built, `grads` that are replicated, averaged already.

    Example:
      >>> share = mon.nonfinite(grads)                                       # doctest: +SKIP
      >>> grads = comm.all_reduce(grads, nonfinite="drop")                   # doctest: +SKIP
    """
    grads = assert_scope("local", grads, "nonfinite")
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(grads)]
    finite = [jnp.isfinite(leaf).all() for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    bad = ~jnp.stack(finite).all() if finite else jnp.asarray(False)
    return all_reduce(bad.astype(jnp.float32))
