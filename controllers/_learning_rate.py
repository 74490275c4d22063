"""Learning rates that follow the global batch, as a gradient transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adaptive.operators.sources import GLOBAL_BATCH, read

Rule = Literal["fixed", "linear", "sqrt", "adascale"]

# Outside a program the global batch is unknown and read as 0; then updates are not changed.
_GLOBAL_BATCH = dataclasses.replace(GLOBAL_BATCH, stand_in=0)


class ScaleByBatchState(NamedTuple):
    """State of `scale_by_batch`."""

    factor: jax.Array  # shape=(), float32: the last factor of the updates
    progress: jax.Array  # shape=(), float32: the sum of the factors: progress in steps of the base batch


def scale_by_batch(
    rule: Rule, base: int, *, power: float = 1.0, warmup: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Return a gradient transformation that scales updates with the global batch.

        tx = optax.chain(optax.sgd(0.1, momentum=0.9), ctrl.scale_by_batch("adascale", base=128))
        updates, opt_state = tx.update(avg_grads, opt_state, params, noise=noise)

    With `s = batch / base`:

    | rule       | factor                             | for                                                            |
    | ---------- | ---------------------------------- | -------------------------------------------------------------- |
    | "fixed"    | 1                                  | no change: the batch alone reduces the noise (Mai et al. 2019) |
    | "linear"   | s                                  | SGD far below the noise scale (Goyal et al. 2017); `warmup`    |
    | "sqrt"     | sqrt(s)                            | Adam and similar (Hoffer et al. 2017; Malladi et al. 2022)     |
    | "adascale" | (noise/base + 1)/(noise/batch + 1) | SGD at any batch (Johnson et al. 2020); `power=0.5`: for Adam  |

    A change of the batch compiles nothing. Outside a program, updates are not changed.

    Args:
      rule: the name of a rule above.
      base: the global batch for which the learning rate was chosen.
      power: exponent of the factor.
      warmup: steps over which the factor approaches a new value, exponentially; it starts at 1.

    Returns:
      A gradient transformation; its results are replicated if its arguments are. "adascale" needs `noise=`, a noise
      scale in examples or the result of `monitors.noise_scale`. While that is not known, the last factor stays, clipped
      to the range from 1 to s. Its state has the last `factor`, and the `progress` in steps of the base batch, for
      schedules: `optax.tree.get(opt_state, "progress")`.

    Raises:
      ValueError: an argument is out of range.
    """
    rules: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
        "fixed": lambda s, noise: jnp.ones_like(s),
        "linear": lambda s, noise: s,
        "sqrt": lambda s, noise: jnp.sqrt(s),
        "adascale": lambda s, noise: jnp.where(jnp.isinf(noise), s, (noise + 1) / (noise / s + 1)),
    }
    if rule not in rules:
        raise ValueError(f"scale_by_batch: rule must be one of {', '.join(map(repr, rules))}; got {rule!r}.")
    if base <= 0 or warmup < 0:
        raise ValueError(f"scale_by_batch: base must be positive and warmup not negative; got {base} and {warmup}.")

    def init_fn(_: optax.Params) -> ScaleByBatchState:
        return ScaleByBatchState(factor=jnp.ones((), jnp.float32), progress=jnp.zeros((), jnp.float32))

    def update_fn(
        updates: optax.Updates, state: ScaleByBatchState, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, ScaleByBatchState]:
        batch = read(_GLOBAL_BATCH).astype(jnp.float32)
        relative_noise = jnp.asarray(_noise(extra) if rule == "adascale" else 0.0, jnp.float32) / base
        s = jnp.maximum(batch, 1.0) / base
        last = jnp.clip(state.factor, jnp.minimum(s**power, 1.0), jnp.maximum(s**power, 1.0))
        target = jnp.where(jnp.isnan(relative_noise), last, rules[rule](s, relative_noise) ** power)
        target = jnp.where(batch > 0, target, 1.0)
        factor = target if warmup == 0 else target + (state.factor - target) * (1 - 1 / warmup)
        scaled = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
        return scaled, ScaleByBatchState(factor=factor, progress=state.progress + factor)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _noise(extra: dict[str, Any]) -> Any:
    if "noise" not in extra:
        raise TypeError(
            "scale_by_batch('adascale') needs the noise scale. Pass it:\n"
            "    updates, opt_state = tx.update(grads, opt_state, params, noise=noise)"
        )
    noise = extra["noise"]
    if hasattr(noise, "signal"):
        return jnp.where(noise.signal > 0, noise.scale, jnp.nan)
    return getattr(noise, "scale", noise)
