"""The gradient noise scale, unbiased for uneven batches, with confidence bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import CollectiveError, worker_index
from adaptive.base.process.source_lines import at, current_line
from adaptive.operators.operator_state import operator_state
from adaptive.operators.replication_claims import assert_mean, assert_scope
from collectives import all_reduce

from ._anova import both_gradients, estimate, summed
from ._averages import Averages, add_sample, no_samples, packed, ratio_bounds, unpacked
from ._layer_sets import By, layer_sets
from ._squares import at_least_single, check_alike, check_norms, squared_norm

Sets = dict[str, list[int]]


class NoiseScale(NamedTuple):
    """Estimates of the noise in a gradient. Each field is a scalar; replicated; NaN before the first sample."""

    scale: jax.Array  # in examples: trace / signal; `lower` if the signal is not positive. Never infinite
    trace: jax.Array  # average estimate of tr Sigma, the summed variance of one example's gradient
    signal: jax.Array  # average estimate of |G|^2, of the true gradient; may be negative if the noise is large
    lower: jax.Array  # in examples: lower bound of the noise scale; 0 if unknown
    upper: jax.Array  # in examples: upper bound of the noise scale; infinite if unknown


@overload
def noise_scale(
    grads: Any,
    avg_grads: Any,
    *,
    per_example: Any = None,
    divide_by: Any = None,
    by: None = None,
    islands: Sequence[Sequence[int]] | None = None,
    decay: float = 0.95,
    confidence: float = 0.95,
) -> NoiseScale: ...


@overload
def noise_scale(
    grads: Any,
    avg_grads: Any,
    *,
    per_example: Any = None,
    divide_by: Any = None,
    by: By,
    islands: Sequence[Sequence[int]] | None = None,
    decay: float = 0.95,
    confidence: float = 0.95,
) -> dict[str, NoiseScale]: ...


def noise_scale(
    grads: Any,
    avg_grads: Any,
    *,
    per_example: Any = None,
    divide_by: Any = None,
    by: By | None = None,
    islands: Sequence[Sequence[int]] | None = None,
    decay: float = 0.95,
    confidence: float = 0.95,
) -> NoiseScale | dict[str, NoiseScale]:
    """Estimate the gradient noise scale, `tr Sigma / |G|^2`: the batch size at which noise and signal are equal.

    Far below the noise scale, doubling the batch is worth almost twice the step; far above, almost nothing. A step has

        trace  S = (sum_i b_i |g_i|^2 - B |gbar|^2) / (n - 1)
        signal Q = |gbar|^2 - S / B

    over n groups of `b_i` examples with mean gradients `g_i`. A group is one microbatch of one worker, or with
    `per_example=` one example. Both are unbiased for any sizes and have the least variance for these groups
    (`_anova.py`). S and Q are averaged over steps, each by itself, with weights `decay^age`; the noise scale is the
    ratio of the averages, `<S> / <Q>`.

    `lower` and `upper` are Fieller's bounds on that ratio (`_averages.py`), which assume that training changes slowly
    compared with `1 / (1 - decay)` steps. If `<Q>` is not positive, the noise hides the signal: `scale` is then
    `lower`, and policies and learning-rate rules take it as not known.

    Groups must be independent samples: batch normalization over all workers couples them, so it is refused. Batch sizes
    may change. A step with fewer than two groups, or with a gradient that is not finite, leaves the averages unchanged.
    Adds 12 bytes to the gradients' message (8 for each set of `by`, and 4).

    Args:
      grads: pytree; the mean gradient over this worker's examples, before clipping and weight decay. Local.
      avg_grads: pytree; its mean over all examples, `comm.all_reduce(grads)`. Replicated; with `islands`, local.
      per_example: the norms that `mon.example_norms` returns beside `grads`: a pytree of the structure of `grads`, each
        leaf of shape=(examples,), in gradient units squared; or of fewer examples (`sample=`). Local.
      divide_by: pytree of positive arrays of the shapes of `grads`, which the optimizer divides gradients by, such as
        `mon.adam_scale(opt_state)`: all results are then those of the divided gradients. It must not depend on this
        step's gradients. Replicated. Not with `per_example`.
      by: a function from a leaf's path, as a tuple of text, to the name of the set of leaves (the layer) that it is in,
        or None to leave the leaf out: `by=lambda path: path[0]`. The result is then a noise scale for each set.
      islands: the workers of each island, as `sync.islands` has them, if `avg_grads` is the mean over this worker's
        island, as `step_with_gradients` returns it. The noise is then that within the m islands, over all of them:
        `S = (sum_i b_i |g_i|^2 - sum_I B_I |gbar_I|^2) / (n - m)` and `Q = sum_I B_I/B |gbar_I|^2 - m S / B`. This
        takes a message of its own, of 4 bytes.
      decay: factor of the weights from one step to the next, at least 0 and below 1.
      confidence: probability that the bounds enclose the noise scale, between 0 and 1.

    Returns:
      `NoiseScale(scale, trace, signal, lower, upper)`: scalars; float32 (float64 if gradients are). Replicated. `scale`
      and its bounds are in examples, `trace` and `signal` in gradient units squared. NaN until a step has two groups.
      With `by`, a dict of these by the names of the sets.

    Raises:
      CollectiveError: gradients, norms or `divide_by` that do not belong together, options out of range or that exclude
        each other, a function `by` that fails or cannot tell layers apart, or, when the program is built, `grads` that
        are replicated or coupled by a collective in their backward pass, or `avg_grads` that are not replicated.

    Example:
      >>> avg_grads = comm.all_reduce(grads)                                      # doctest: +SKIP
      >>> noise = mon.noise_scale(grads, avg_grads)                               # doctest: +SKIP

    References:
      McCandlish et al. 2018, "An empirical model of large-batch training", section 2.2 and appendix A.1.
      Mai et al. 2019, "Taming hyperparameters in deep learning systems", Listing 1.
    """
    check_alike("noise_scale", grads, avg_grads)
    what, hint = "noise_scale", both_gradients("noise_scale")
    if islands is None:
        grads, avg_grads = assert_mean(grads, avg_grads, what, hint=hint)
    else:
        grads = assert_scope("independent", grads, what, hint=hint)
    wrong = [
        f"decay={decay!r} must be at least 0 and below 1" if not 0 <= decay < 1 else "",
        f"confidence={confidence!r} must be between 0 and 1" if not 0 < confidence < 1 else "",
    ]
    if any(wrong):
        raise CollectiveError(f"noise_scale{at(current_line())}: {', '.join(filter(None, wrong))}.")
    if per_example is not None:
        check_norms(grads, per_example)
    if divide_by is not None:
        grads, avg_grads = _divided(grads, avg_grads, divide_by, per_example)
    sets = None if by is None else layer_sets(grads, by)
    if per_example is None:
        sums = summed(_over(sets, grads, squared_norm), of_examples=False)
    else:
        sums = summed(_over(sets, per_example, _mean), of_examples=True)
    mean = _over(sets, avg_grads, partial(squared_norm, averaged=True))
    if islands is None:
        trace, signal = estimate(sums, mean)
    else:
        trace, signal = estimate(sums, all_reduce(mean), _number_of(islands).astype(mean.dtype))
    sample = jnp.stack([trace, signal], axis=-1)

    def update(old: jax.Array, sample: jax.Array) -> tuple[jax.Array, NoiseScale]:
        averages = add_sample(unpacked(old), sample, decay)
        return packed(averages), summary(averages, confidence)

    init = np.concatenate([np.ravel(x) for x in no_samples(sample.dtype)])
    if sets is None:
        return operator_state("noise_scale", init, lambda old: update(old, sample))
    of_sets = np.tile(init, (len(sets), 1))
    noise = operator_state("noise_scale", of_sets, lambda old: jax.vmap(update)(old, sample))
    return {name: NoiseScale(*(field[i] for field in noise)) for i, name in enumerate(sets)}


def _number_of(islands: Sequence[Sequence[int]]) -> jax.Array:
    """Return the number of islands that take examples in this step. Replicated."""
    slots = jnp.arange(sum(map(len, islands)), dtype=jnp.int32)
    rows = all_reduce((slots == worker_index()).astype(jnp.int32), op="sum")
    return jnp.stack([rows[np.array(island)].max() for island in islands]).sum()


def _divided(grads: Any, avg_grads: Any, divide_by: Any, per_example: Any) -> tuple[Any, Any]:
    """Return both gradients, divided elementwise by `divide_by` unless it is None."""
    shapes = [list(map(jnp.shape, jax.tree.leaves(tree))) for tree in (grads, divide_by)]
    if per_example is not None or shapes[0] != shapes[1]:
        why = "must have the structure and shapes of the gradients"
        if per_example is not None:
            why = "and per_example exclude each other: the norms are those of gradients that are not divided"
        raise CollectiveError(f"noise_scale{at(current_line())}: divide_by {why}.")
    hint = "Pass divide_by=mon.adam_scale(opt_state), with the state before an update by averaged gradients."
    divide_by = jax.tree.leaves(assert_scope("before", divide_by, "noise_scale", hint=hint))

    def divided(tree: Any) -> Any:
        leaves = [g / p.astype(g.dtype) for g, p in zip(jax.tree.leaves(tree), divide_by, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    return divided(grads), divided(avg_grads)


def _over(sets: Sets | None, tree: Any, norm: Callable[[Any], jax.Array]) -> jax.Array:
    """Return the norm of a tree, a scalar; or the norms of its sets of leaves, shape=(sets,)."""
    if sets is None:
        return norm(tree)
    leaves = jax.tree.leaves(tree)
    norms = [norm([leaves[index] for index in indices]) for indices in sets.values()]
    return jnp.stack([n.astype(at_least_single(*(n.dtype for n in norms))) for n in norms])


def _mean(norms: Any) -> jax.Array:
    """Return the mean over examples of squared norms, which are sums over leaves."""
    leaves = jax.tree.leaves(norms)
    dtype = at_least_single(*(leaf.dtype for leaf in leaves))
    return jnp.mean(sum(leaf.astype(dtype) for leaf in leaves))


def summary(averages: Averages, confidence: float) -> NoiseScale:
    """Return the noise scale and its bounds that follow from the averages."""
    trace, signal = averages.mean
    lower, upper = ratio_bounds(averages, confidence)
    positive = signal > trace / jnp.finfo(trace.dtype).max  # and the quotient is finite
    scale = jnp.where(positive, trace / jnp.where(positive, signal, 1), lower)
    noise = NoiseScale(scale, trace, signal, lower, upper)
    return jax.tree.map(lambda x: jnp.where(averages.weight > 0, x, jnp.nan), noise)
