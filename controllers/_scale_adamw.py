"""`scale_adamw`: AdamW whose learning rate, betas, epsilon and weight decay follow the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adaptive import DriverError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.numbers import real
from adaptive.operators.sources import GLOBAL_BATCH, read

# Outside a program the global batch is unknown and read as 0; then the base batch is assumed.
_GLOBAL_BATCH = replace(GLOBAL_BATCH, stand_in=0)


class ScaleAdamWState(NamedTuple):
    """State of `scale_adamw`."""

    progress: jax.Array  # shape=(), float32: examples seen, in base batches
    mu: optax.Updates  # moving average of gradients
    nu: optax.Updates  # moving average of squared gradients, times batch / base
    decay: optax.OptState  # of the weight decay's mask


def scale_adamw(
    learning_rate: float | jax.Array | Callable[[jax.Array], jax.Array],
    *,
    base: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Return AdamW with hyperparameters chosen for one batch size, and adapted to the global batch of each step.

        tx = optax.chain(optax.clip_by_global_norm(1.0), ctrl.scale_adamw(3e-4, base=64, weight_decay=0.1))

    With `s = batch / base`, a step is one of `optax.adamw` with

    | hyperparameter | value             | what stays the same                                                      |
    | -------------- | ----------------- | ------------------------------------------------------------------------ |
    | learning rate  | lr * sqrt(s)      | the noise of the updates per example seen                                |
    | b1, b2         | b1 ** s, b2 ** s  | the number of examples that the averages remember                        |
    | eps            | eps / sqrt(s)     | eps relative to sqrt(nu), which is proportional to 1 / sqrt(batch)       |
    | weight decay   | lambda * sqrt(s)  | batch / (lr * lambda), the number of examples that the weights remember  |

    Runs with different batches then follow the same stochastic differential equation below the noise scale. Bias
    corrections count examples. A change takes effect in the same step, and compiles nothing. Do not combine with
    `scale_by_batch`. Outside a program s is 1.

    Args:
      learning_rate: the learning rate at the base batch: a number, or a schedule. A schedule's argument is the number
        of examples seen in units of the base batch, so it ends after the same number of examples with any batch.
      base: the global batch for which the hyperparameters were chosen.
      b1, b2, eps, weight_decay: values at the base batch, as in `optax.adamw`.
      mask: weights that decay, as in `optax.adamw`.

    Returns:
      A gradient transformation; its results are replicated if its arguments are. Its state has the `progress`, in base
      batches.

    Raises:
      DriverError: an argument is out of range. From `update`: `params` is missing.

    References:
      Malladi et al. 2022, "On the SDEs and scaling rules for adaptive gradient algorithms" (arXiv 2205.10287),
      definition 5.2, whose 1 - s (1 - b) agrees with b ** s to first order; Busbridge et al. 2023, "How to scale your
      EMA" (arXiv 2307.13813); Wang and Aitchison 2024, "How to set AdamW's weight decay" (arXiv 2405.13698).
    """
    base_batch = _check(base, b1, b2, eps, weight_decay)
    decay = optax.add_decayed_weights(weight_decay, mask)

    def init_fn(params: optax.Params) -> ScaleAdamWState:
        mu = jax.tree.map(jnp.zeros_like, params)
        nu = jax.tree.map(lambda p: jnp.zeros_like(jnp.real(p)), params)
        return ScaleAdamWState(jnp.zeros((), jnp.float32), mu, nu, decay.init(params))

    def update_fn(
        updates: optax.Updates, state: ScaleAdamWState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, ScaleAdamWState]:
        if params is None:
            raise DriverError(
                f"scale_adamw{at(current_line())}: weight decay needs the weights. Write:\n"
                "    updates, opt_state = tx.update(avg_grads, opt_state, params)"
            )
        batch = read(_GLOBAL_BATCH).astype(jnp.float32)
        s = jnp.where(batch > 0, batch / base_batch, 1.0)
        keep1, keep2, progress = b1**s, b2**s, state.progress + s
        rate = jnp.asarray(learning_rate(state.progress) if callable(learning_rate) else learning_rate, jnp.float32)
        # In units of the base batch (nu is multiplied by s), sqrt(s) cancels except for one factor s of step and decay.
        mu = jax.tree.map(lambda m, g: _mix(m, g, keep1), state.mu, updates)
        nu = jax.tree.map(lambda v, g: _mix(v, (g * g.conj()).real * s.astype(v.dtype), keep2), state.nu, updates)
        seen1, seen2 = 1 - b1**progress, 1 - b2**progress
        root = jax.tree.map(lambda v: jnp.sqrt(v / seen2.astype(v.dtype)) + eps, nu)
        steps = jax.tree.map(lambda m, r: m / seen1.astype(r.dtype) / r, mu, root)
        steps, decayed = decay.update(steps, state.decay, params)
        steps = jax.tree.map(lambda u: u * jnp.asarray(-rate * s, u.dtype), steps)
        return steps, ScaleAdamWState(progress, mu, nu, decayed)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _mix(average: jax.Array, new: jax.Array, keep: jax.Array) -> jax.Array:
    """Return the moving average with a new value, in the average's dtype."""
    kept = keep.astype(average.real.dtype)
    return (kept * average + (1 - kept) * new).astype(average.dtype)


def _check(base: Any, b1: float, b2: float, eps: float, weight_decay: float) -> float:
    where, number = at(current_line()), real(base)
    if number is None or not number > 0:
        raise DriverError(f"scale_adamw{where}: base is a number of examples, 1 or more; got {base!r}.")
    if not (0 <= b1 < 1 and 0 <= b2 < 1 and eps >= 0 and weight_decay >= 0):
        raise DriverError(
            f"scale_adamw{where}: b1 and b2 are from 0 to below 1, eps and weight_decay not negative; got b1={b1}, "
            f"b2={b2}, eps={eps} and weight_decay={weight_decay}."
        )
    return number
