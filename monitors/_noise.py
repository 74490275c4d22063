"""The gradient noise scale, exact for uneven batches, with bounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import CollectiveError
from adaptive.extend import assert_scope, at, current_line, operator_state

from ._anova import estimate, totals
from ._averages import Averages, add_sample, no_samples, ratio_bounds
from ._squares import check_alike, squared_norm


class NoiseScale(NamedTuple):
    """What is known of the noise in a gradient. Every field is a scalar; replicated; NaN while undefined."""

    scale: jax.Array  # examples: trace / signal; where no signal is seen, `lower`. Always finite
    trace: jax.Array  # averaged estimate of tr Sigma, the summed variance of one example's gradient
    signal: jax.Array  # averaged estimate of |G|^2, of the true gradient; may be negative where the noise hides it
    lower: jax.Array  # examples: the noise scale is at least this; 0 while nothing is known
    upper: jax.Array  # examples: it is at most this; infinite where no bound is known


def noise_scale(
    grads: Any,
    avg_grads: Any,
    *,
    decay: float = 0.95,
    confidence: float = 0.95,
    dataset_size: int | None = None,
) -> NoiseScale:
    """The gradient noise scale, `tr Sigma / |G|^2` in examples: the batch size at which noise and signal are even.

    Far below it, a batch of twice the size is worth almost twice the step; far above, almost nothing. A single step's
    estimates are

        trace  S = (sum_i b_i |g_i|^2 - B |gbar|^2) / (n - 1)
        signal Q = |gbar|^2 - S / B

    over n groups of `b_i` examples with mean gradients `g_i`, where a group is a worker's kernel call: so micro-batches
    count as workers do, and one worker with two of them is enough. Both are unbiased for any sizes, and of least
    variance (`_anova.py`). S and Q are averaged over steps, apart, with weights `decay^age` that need no correction for
    bias; then divided:

        scale = <S> / <Q>

    `lower` and `upper` are Fieller's bounds on that ratio (`_averages.py`), which need steps that are alike and
    independent: a stationary stream, which training is where it drifts slowly against `1 / (1 - decay)` steps. They
    are wide where few steps have been seen. Where `<Q>` is not positive, the noise is so large that no signal is seen:
    `scale` is then `lower`, which is near zero in the first few steps.

    Averages are kept when batch sizes change, since S and Q are of single examples, whatever the batch. A step with
    fewer than two groups, or with a gradient that is not finite, changes nothing.

    Costs 12 bytes on the gradients' message, and no message of its own; and one pass each over the gradient and its
    mean, for their squared norms.

    Args:
      grads: pytree; the mean gradient over this worker's examples, before clipping and weight decay. Local.
      avg_grads: pytree; its mean over all examples, `comm.all_reduce(grads)`. Replicated.
      decay: of the weights, from one step to the next; averages are over (1 + decay) / (1 - decay) steps, so to speak.
      confidence: that the bounds hold.
      dataset_size: number of examples in the data set, if a batch is a good part of it. The signal is then that of the
        data set's own gradient, and batches are drawn without replacement: `Q = |gbar|^2 - S (1/B - 1/dataset_size)`.

    Returns:
      `NoiseScale(scale, trace, signal, lower, upper)`: scalars of float32 (float64 if gradients are). Replicated. NaN
      until a step had two groups.

    Raises:
      CollectiveError: gradients of different structure or shapes, one gradient in both places, options out of range,
        or, when the program is built, `grads` that are replicated, averaged already, or `avg_grads` that are not.

    Example:
      >>> avg_grads = comm.all_reduce(grads)                                      # doctest: +SKIP
      >>> noise = mon.noise_scale(grads, avg_grads)                               # doctest: +SKIP
      >>> ctrl.hook(lambda control, noise: control.rescale(global_batch=noise.lower), noise)   # doctest: +SKIP

    References:
      McCandlish et al. 2018, "An empirical model of large-batch training", section 2.2 and appendix A.1.
      Mai et al. 2019, "Taming hyper-parameters in deep learning systems", Listing 1.
    """
    check_alike("noise_scale", grads, avg_grads)
    avg_grads = assert_scope("reduced", avg_grads, "noise_scale")
    _check_options(decay, confidence, dataset_size)
    trace, signal = estimate(totals(grads, "noise_scale"), squared_norm(avg_grads, averaged=True), dataset_size)
    sample = jnp.stack([trace, signal])

    def update(packed: jax.Array) -> tuple[jax.Array, NoiseScale]:
        averages = add_sample(_averages_of(packed), sample, decay)
        return _packed(averages), summary(averages, confidence)

    return operator_state("noise_scale", np.concatenate([np.ravel(x) for x in no_samples(sample.dtype)]), update)


def _packed(averages: Averages) -> jax.Array:
    """Return averages as one array; shape=(7,). Each array that a program takes and returns costs microseconds."""
    return jnp.concatenate([jnp.ravel(x) for x in averages])


def _averages_of(packed: jax.Array) -> Averages:
    return Averages(packed[0], packed[1], packed[2:4], packed[4:6], packed[6])


def summary(averages: Averages, confidence: float) -> NoiseScale:
    """The noise scale as far as the averages know it."""
    trace, signal = averages.mean
    lower, upper = ratio_bounds(averages, confidence)
    positive = signal > trace / jnp.finfo(trace.dtype).max  # as far as a quotient can be told
    scale = jnp.where(positive, trace / jnp.where(positive, signal, 1), lower)
    noise = NoiseScale(scale, trace, signal, lower, upper)
    return jax.tree.map(lambda x: jnp.where(averages.weight > 0, x, jnp.nan), noise)


def _check_options(decay: float, confidence: float, dataset_size: int | None) -> None:
    wrong = [
        f"decay={decay!r} must be at least 0 and below 1" if not 0 <= decay < 1 else "",
        f"confidence={confidence!r} must be between 0 and 1" if not 0 < confidence < 1 else "",
        f"dataset_size={dataset_size!r} must be positive" if dataset_size is not None and dataset_size <= 0 else "",
    ]
    if any(wrong):
        raise CollectiveError(f"noise_scale{at(current_line())}: {', '.join(filter(None, wrong))}.")
