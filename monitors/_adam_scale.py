"""Adam's divisor of gradients, for the noise scale in Adam's metric."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from adaptive import CollectiveError
from adaptive.base.process.source_lines import at, current_line

_FIELDS = ("count", "mu", "nu")  # of Adam's state, as optax names them


def adam_scale(opt_state: Any, *, b2: float = 0.999, eps: float = 1e-8) -> Any:
    """Return Adam's divisor of gradients, `sqrt(s) + eps`, for `mon.noise_scale(divide_by=…)`.

    Args:
      opt_state: the state of an optax optimizer that contains one state of Adam, before this step's update. Replicated.
      b2, eps: the optimizer's.

    Returns:
      A pytree of the structure and shapes of the gradients, in gradient units. NaN before the first update, which
      `noise_scale` ignores. Replicated.

    Raises:
      CollectiveError: `opt_state` has no state of Adam or several, or `b2` is out of range.

    Example:
      >>> noise = mon.noise_scale(grads, avg_grads, divide_by=mon.adam_scale(opt_state))    # doctest: +SKIP
    """
    start = f"adam_scale{at(current_line())}: "
    if not 0 <= b2 < 1:
        raise CollectiveError(f"{start}b2={b2!r} must be at least 0 and below 1.")
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_adam) if _is_adam(node)]
    if len(found) != 1:
        raise CollectiveError(
            f"{start}the optimizer's state must contain the moments of one Adam, but contains {len(found)}. Pass the "
            "state of optax.adam, adamw or a chain with one of them."
        )
    left = 1 - jnp.float32(b2) ** jnp.asarray(found[0].count).astype(jnp.float32)
    left = jnp.where(left > 0, left, jnp.nan)
    return jax.tree.map(lambda s: jnp.sqrt(s / left.astype(s.dtype)) + eps, found[0].nu)


def _is_adam(node: Any) -> bool:
    return all(hasattr(node, name) for name in _FIELDS) and not isinstance(node, jax.Array)
