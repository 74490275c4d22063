"""The training step of most benchmarks, as a driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

import collectives as comm


def driver_of(
    loss_fn: Callable[[Any, Any], jax.Array],
    optimizer: optax.GradientTransformation,
    more: Callable[[Any, Any], dict[str, Any]] = lambda grads, avg_grads: {},
) -> Callable[[Any, Any], tuple[Any, dict[str, Any]]]:
    """Return a driver whose state is (params, opt_state). `more(grads, avg_grads)` calls hooks, and returns metrics."""

    def driver(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        avg_grads = comm.all_reduce(grads)
        metrics = {"loss": comm.all_reduce(loss), **more(grads, avg_grads)}
        updates, opt_state = optimizer.update(avg_grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    return driver
