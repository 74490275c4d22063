"""The share of examples that `all_reduce(nonfinite="drop")` leaves out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from adaptive.operators.replication_claims import assert_scope
from collectives import all_reduce

_BEFORE_REDUCTION = """Pass this worker's gradient:
    share = mon.nonfinite(grads)
    grads = comm.all_reduce(grads, nonfinite="drop")"""


def nonfinite(grads: Any) -> jax.Array:
    """Return the share of examples whose gradient is not finite, and which `nonfinite="drop"` leaves out.

    A microbatch contributes one gradient for all its examples, so one example that overflows counts as all examples of
    its microbatch. Adds 4 bytes to the gradients' message.

    Args:
      grads: pytree; the mean gradient over this worker's examples. Local.

    Returns:
      A float32 scalar, from 0 to 1. Replicated.

    Raises:
      CollectiveError: when the program is built, `grads` that are replicated.

    Example:
      >>> share = mon.nonfinite(grads)                                       # doctest: +SKIP
      >>> grads = comm.all_reduce(grads, nonfinite="drop")                   # doctest: +SKIP
    """
    grads = assert_scope("local", grads, "nonfinite", hint=_BEFORE_REDUCTION)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(grads)]
    finite = [jnp.isfinite(leaf).all() for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    bad = ~jnp.stack(finite).all() if finite else jnp.asarray(False)
    return all_reduce(bad.astype(jnp.float32))
