"""The gradient noise scale, unbiased for uneven batches, with confidence bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import CollectiveError, step_number, worker_index
from adaptive.base.source_lines import at, current_line
from adaptive.operators.operator_state import operator_state
from adaptive.operators.replication_claims import assert_mean, assert_scope
from collectives import all_reduce

from ._anova import both_gradients, estimate, summed
from ._averages import Averages, SharedError, add_sample, no_samples, packed, ratio_bounds, unpacked
from ._layer_sets import By, layer_sets
from ._metrics import METRICS, Metric, Sets, noise_factor, only_matrices, squared_dual_norm
from ._norm_layers import EstimatedNorms, RatioError, ratio_error
from ._squares import at_least_single, check_alike, check_norms


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
    metric: Metric = "euclidean",
    every: int = 1,
    by: None = None,
    islands: Sequence[Sequence[int]] | None = None,
    decay: float = 0.95,
    confidence: float = 0.95,
    dataset_size: int | None = None,
) -> NoiseScale: ...


@overload
def noise_scale(
    grads: Any,
    avg_grads: Any,
    *,
    per_example: Any = None,
    divide_by: Any = None,
    metric: Metric = "euclidean",
    every: int = 1,
    by: By,
    islands: Sequence[Sequence[int]] | None = None,
    decay: float = 0.95,
    confidence: float = 0.95,
    dataset_size: int | None = None,
) -> dict[str, NoiseScale]: ...


def noise_scale(
    grads: Any,
    avg_grads: Any,
    *,
    per_example: Any = None,
    divide_by: Any = None,
    metric: Metric = "euclidean",
    every: int = 1,
    by: By | None = None,
    islands: Sequence[Sequence[int]] | None = None,
    decay: float = 0.95,
    confidence: float = 0.95,
    dataset_size: int | None = None,
) -> NoiseScale | dict[str, NoiseScale]:
    """Estimate the gradient noise scale, `tr Sigma / |G|^2`: the batch size at which noise and signal are equal.

    Far below the noise scale, doubling the batch is worth almost twice the step; far above, almost nothing. The
    estimates of a single step are

        trace  S = (sum_i b_i |g_i|^2 - B |gbar|^2) / (n - 1)
        signal Q = |gbar|^2 - S / B

    over n groups of `b_i` examples with mean gradients `g_i`. A group is one microbatch of one worker, so one worker
    with two microbatches is enough. Both estimates are unbiased for any sizes and have the least variance for these
    groups (`_anova.py`). With `per_example=`, each group is one example: n = B, and the variance of S is smaller by a
    factor of (B - 1) / (n - 1). S and Q are averaged over steps, each by itself, with weights `decay^age` that need no
    bias correction; the noise scale is the ratio of the averages:

        scale = <S> / <Q>

    `lower` and `upper` are Fieller's bounds on that ratio (`_averages.py`). They assume independent, identically
    distributed steps, which holds if training changes slowly compared with `1 / (1 - decay)` steps. They are wide after
    few steps. If `<Q>` is not positive, the noise hides the signal, and `scale` is `lower`, which is near zero in the
    first few steps. Policies and learning-rate rules take the noise scale as not known then.

    Groups must be independent samples. Batch normalization over all workers couples their gradients in its backward
    pass, so it is refused.

    The averages survive changes of batch sizes, since S and Q are per example at any batch size. A step with fewer than
    two groups, or with a gradient that is not finite, leaves them unchanged.

    Adds 12 bytes to the gradients' message (8 for each set of `by`, and 4) and no message of its own, and costs one
    pass each over the gradient and its mean; with `per_example`, over the mean only.

    Args:
      grads: pytree; the mean gradient over this worker's examples, before clipping and weight decay. Local.
      avg_grads: pytree; its mean over all examples, `comm.all_reduce(grads)`. Replicated; with `islands`, local.
      per_example: the norms that `mon.example_norms` returns beside `grads`: a pytree of the structure of `grads`, each
        leaf of shape=(examples,), in gradient units squared; or of fewer examples (`sample=`); or an `EstimatedNorms`
        (`full_every=`). Local.
      divide_by: pytree of positive arrays of the shapes of `grads`, which the optimizer divides gradients by, such as
        `mon.adam_scale(opt_state)`: trace, signal and scale are then those of the divided gradients, `g / p`. It must
        not depend on this step's gradients. Replicated. Not with `per_example`.
      metric: the norm in which noise and signal are compared, by the optimizer: "euclidean", "sign" for Lion and Signum
        (`(sum_j sigma_j / sum_j |G_j|)^2`), "spectral" for Muon (`(tr E[N N']^(1/2) / |G|_*)^2`, over the leaves that
        are matrices). `trace` and `signal` are then numerator and denominator of these squares. See `_metrics.py` for
        what is assumed. Not with `per_example` or `divide_by`.
      every: take a sample in every this many steps. Saves the cost of the norms in the others, which is high for
        "spectral". Not with `per_example`.
      by: a function from a leaf's path, as a tuple of text, to the name of the set of leaves (the layer) that it is in,
        or None to leave the leaf out: `by=lambda path: path[0]`. The result is then a noise scale for each set.
      islands: the workers of each island, as `sync.islands` has them, if `avg_grads` is the mean over this worker's
        island, as `step_with_gradients` returns it. The noise is then that within islands, over all of them:
        `S = (sum_i b_i |g_i|^2 - sum_I B_I |gbar_I|^2) / (n - m)` and `Q = sum_I B_I/B |gbar_I|^2 - m S / B`, with m
        islands. This takes a message of its own, of 4 bytes. Not with `dataset_size`.
      decay: factor of the weights from one step to the next, at least 0 and below 1; the averages are over effectively
        (1 + decay) / (1 - decay) steps.
      confidence: probability that the bounds enclose the noise scale, between 0 and 1.
      dataset_size: number of examples in the data set, if a batch is a large part of it. The signal is then that of the
        data set's own gradient, and batches are drawn without replacement: `Q = |gbar|^2 - S (1/B - 1/dataset_size)`.

    Returns:
      `NoiseScale(scale, trace, signal, lower, upper)`: scalars; float32 (float64 if gradients are). Replicated. `scale`
      and its bounds are in examples, `trace` and `signal` in gradient units squared. NaN until a step has two groups.
      With `by`, a dict of these by the names of the sets.

    Raises:
      CollectiveError: gradients of different structure or shapes, the same arrays for both arguments, norms that do not
        belong to the gradients or to the examples, `divide_by` of another structure, options out of range or that
        exclude each other, no matrices for "spectral", a function `by` that fails or cannot tell layers apart, or,
        when the program is built, `grads` that are replicated or coupled by a collective in their backward pass, or
        `avg_grads` that are not replicated.

    Example:
      >>> avg_grads = comm.all_reduce(grads)                                      # doctest: +SKIP
      >>> noise = mon.noise_scale(grads, avg_grads)                               # doctest: +SKIP
      >>> ctrl.hook(lambda control, noise: control.rescale(global_batch=noise.lower), noise)   # doctest: +SKIP
      >>> layers = mon.noise_scale(grads, avg_grads, by=lambda path: path[0])     # doctest: +SKIP

    References:
      McCandlish et al. 2018, "An empirical model of large-batch training", section 2.2 and appendix A.1.
      Mai et al. 2019, "Taming hyperparameters in deep learning systems", Listing 1.
      Gray et al. 2024, "Normalization layer per-example gradients are sufficient to predict gradient noise scale in
      transformers", section 2.
    """
    check_alike("noise_scale", grads, avg_grads)
    what, hint = "noise_scale", both_gradients("noise_scale")
    if islands is None:
        grads, avg_grads = assert_mean(grads, avg_grads, what, hint=hint)
    else:
        grads = assert_scope("independent", grads, what, hint=hint)
    _check_options(decay, confidence, dataset_size, islands)
    _check_metric(metric, every, per_example, divide_by)
    partly = per_example if isinstance(per_example, EstimatedNorms) else None
    per_example = per_example if partly is None else partly.norms
    if per_example is not None:
        check_norms("noise_scale", grads, per_example)
    if divide_by is not None:
        grads, avg_grads = _divided(grads, avg_grads, divide_by, per_example)
    sets = None if by is None else layer_sets(grads, by, "noise_scale")
    if metric == "spectral":
        grads, avg_grads, sets = _matrices(grads, avg_grads, sets)
    due = step_number() % every == 0 if every > 1 else None
    if per_example is None:
        squares = _if_due(due, jnp.nan, lambda: _over(sets, grads, partial(squared_dual_norm, metric)))
        sums = summed(squares, of_examples=False)
    else:
        sums = summed(_over(sets, per_example, _mean), of_examples=True)
    mean = _if_due(due, 0, lambda: _over(sets, avg_grads, partial(squared_dual_norm, metric, averaged=True)))
    if islands is None:
        trace, signal = estimate(sums, mean, dataset_size)
    else:
        trace, signal = estimate(sums, all_reduce(mean), None, islands=_number_of(islands).astype(mean.dtype))
    factors = _over(sets, grads, lambda tree: jnp.asarray(noise_factor(metric, jax.tree.leaves(tree)), mean.dtype))
    sample = jnp.stack([trace / factors, signal], axis=-1)
    error = None if partly is None else _errors(partly, sets)

    def update(old: jax.Array, sample: jax.Array, error: RatioError | None) -> tuple[jax.Array, NoiseScale]:
        averages = add_sample(unpacked(old), sample, decay)
        shared = None if error is None else shared_error(averages, error, sums.examples)
        return packed(averages), summary(averages, confidence, shared)

    init = np.concatenate([np.ravel(x) for x in no_samples(sample.dtype)])
    if sets is None:
        return operator_state("noise_scale", init, lambda old: update(old, sample, error))
    of_sets = np.tile(init, (len(sets), 1))
    noise = operator_state("noise_scale", of_sets, lambda old: jax.vmap(update)(old, sample, error))
    return {name: NoiseScale(*(field[i] for field in noise)) for i, name in enumerate(sets)}


def _number_of(islands: Sequence[Sequence[int]]) -> jax.Array:
    """Return the number of islands that take examples in this step. Replicated."""
    capacity = sum(map(len, islands))
    rows = all_reduce((jnp.arange(capacity, dtype=jnp.int32) == worker_index()).astype(jnp.int32), op="sum")
    present = [rows[np.array(island)].max() for island in islands]
    return jnp.stack(present).sum()


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


def _matrices(grads: Any, avg_grads: Any, sets: Sets | None) -> tuple[list[Any], list[Any], Sets | None]:
    """Return both gradients' leaves that are matrices, and the sets of these."""
    leaves, averages = jax.tree.leaves(grads), jax.tree.leaves(avg_grads)
    kept, sets = only_matrices(leaves, sets)
    if not kept or sets == {}:
        raise CollectiveError(
            f'noise_scale{at(current_line())}: metric="spectral" is for optimizers that orthogonalize the gradients of '
            "matrices, such as Muon, but no leaf"
            f'{" in a set of by=" if kept else ""} has two axes. Use metric="sign", or leave metric= out.'
        )
    return [leaves[i] for i in kept], [averages[i] for i in kept], sets


def _if_due(due: jax.Array | None, otherwise: float, compute: Callable[[], jax.Array]) -> jax.Array:
    """Return `compute()`, or an array filled with `otherwise` in steps that are not due."""
    if due is None:
        return compute()
    result = jax.eval_shape(compute)
    return jax.lax.cond(due, compute, lambda: jnp.full(result.shape, otherwise, result.dtype))


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


def _errors(partly: EstimatedNorms, sets: Sets | None) -> RatioError:
    """Return the errors of estimated norms, scalars; or those of each set of leaves, shape=(sets,)."""
    if sets is None:
        return ratio_error(partly.measured, partly.own, range(partly.measured.shape[1]))
    errors = [ratio_error(partly.measured, partly.own, leaves) for leaves in sets.values()]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *errors)


def shared_error(averages: Averages, error: RatioError, batch: jax.Array) -> SharedError:
    """Return the error of averages that comes from estimated norms, whose mean is `trace + signal`.

    An error e of the mean norm is one of `e B / (B - 1)` in the trace, and of `-e / (B - 1)` in the signal.
    """
    deviation = error.deviation * jnp.maximum(averages.mean.sum(), 0) / jnp.maximum(batch - 1, 1)
    return SharedError(deviation * jnp.stack([batch, -jnp.ones_like(batch)]), error.dof)


def summary(averages: Averages, confidence: float, shared: SharedError | None = None) -> NoiseScale:
    """Return the noise scale and its bounds that follow from the averages."""
    trace, signal = averages.mean
    lower, upper = ratio_bounds(averages, confidence, shared)
    positive = signal > trace / jnp.finfo(trace.dtype).max  # and the quotient is finite
    scale = jnp.where(positive, trace / jnp.where(positive, signal, 1), lower)
    noise = NoiseScale(scale, trace, signal, lower, upper)
    return jax.tree.map(lambda x: jnp.where(averages.weight > 0, x, jnp.nan), noise)


def _check_metric(metric: str, every: int, per_example: Any, divide_by: Any) -> None:
    wrong = ""
    if metric not in METRICS:
        wrong = f"metric={metric!r} must be one of {', '.join(map(repr, METRICS))}"
    elif not (isinstance(every, int) and every > 0):
        wrong = f"every={every!r} must be a positive integer"
    elif metric != "euclidean" and per_example is not None:
        wrong = f"metric={metric!r} and per_example exclude each other: the norms of single examples are Euclidean"
    elif metric != "euclidean" and divide_by is not None:
        wrong = f"metric={metric!r} and divide_by exclude each other: an optimizer has one metric"
    elif every > 1 and per_example is not None:
        wrong = "every= and per_example exclude each other: write example_norms(loss_fn, full_every=…)"
    if wrong:
        raise CollectiveError(f"noise_scale{at(current_line())}: {wrong}.")


def _check_options(decay: float, confidence: float, dataset_size: int | None, islands: Any) -> None:
    wrong = [
        f"decay={decay!r} must be at least 0 and below 1" if not 0 <= decay < 1 else "",
        f"confidence={confidence!r} must be between 0 and 1" if not 0 < confidence < 1 else "",
        f"dataset_size={dataset_size!r} must be positive" if dataset_size is not None and dataset_size <= 0 else "",
        "islands= and dataset_size= exclude each other" if islands is not None and dataset_size is not None else "",
    ]
    if any(wrong):
        raise CollectiveError(f"noise_scale{at(current_line())}: {', '.join(filter(None, wrong))}.")
