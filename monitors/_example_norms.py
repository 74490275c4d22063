"""Squared gradient norms of single examples, beside the gradient itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from adaptive import CollectiveError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.numbers import whole
from adaptive.operators.context import tracing

from ._squares import at_least_single


def example_norms(
    loss_fn: Callable[..., Any], *, has_aux: bool = False, sample: int | None = None
) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a function that computes loss, gradient and each example's squared gradient norm.

    Takes the place of `jax.value_and_grad`. The norms come from `jax.vmap(jax.grad(loss_fn))` over batches of one
    example, which costs another backward pass and memory for a gradient per example. With `sample`, `noise_scale`
    remains unbiased, and its bounds become wider. The examples must be independent of each other, which is not
    verified: with batch normalization or a contrastive loss there are no gradients of single examples.

    Args:
      loss_fn: a function `loss_fn(params, batch, *others)` that returns the loss, a scalar. The arrays of `batch` have
        the examples along their first axis; `others` are equal for all examples, such as statistics or random keys.
      has_aux: whether `loss_fn` returns `(loss, aux)`. `aux` may be anything, also a mean over the batch.
      sample: compute norms of this many examples only, the first of the batch, which must be in random order.

    Returns:
      A function of the same arguments that returns `(loss, grads, norms)` or `((loss, aux), grads, norms)`. `norms` has
      the structure of `params`; each leaf has shape=(examples,), or shape=(min(sample, examples),); float32 or better,
      in gradient units squared. All local.

    Raises:
      CollectiveError: `sample` is not a positive integer; or, when called: `params` has a leaf that is not a float, the
        arrays of the batch differ in length, or the loss is not a scalar.

    Example:
      >>> loss, grads, norms = mon.example_norms(loss_fn)(params, batch)          # doctest: +SKIP
      >>> avg_grads = comm.all_reduce(grads)                                      # doctest: +SKIP
      >>> noise = mon.noise_scale(grads, avg_grads, per_example=norms)            # doctest: +SKIP
    """
    count = whole(sample)
    if sample is not None and (count is None or count < 1):
        raise CollectiveError(
            f"example_norms{at(current_line())}: sample={sample!r} must be a positive integer, or None for all "
            "examples."
        )

    def loss_grads_and_norms(params: Any, batch: Any, *others: Any) -> tuple[Any, Any, Any]:
        start = f"example_norms{at(current_line())}: "
        _check_parameters(params, start)
        examples = _number_of_examples(batch, start)
        sampled = examples if count is None else min(count, examples)
        if (trace := tracing()) is not None and examples == trace.examples:
            trace.sampled.add(sampled)  # so that `check_norms` tells a sample from norms of another batch

        def whole(params: Any, batch: Any) -> tuple[jax.Array, Any]:
            returned = loss_fn(params, batch, *others)
            loss, aux = returned if has_aux else (returned, None)
            if jnp.shape(loss) != ():
                raise CollectiveError(
                    f"{start}the loss must be a scalar, the mean over the batch, and has shape {jnp.shape(loss)}."
                )
            return loss, aux

        def squares(row: Any) -> Any:
            grads, _ = jax.grad(whole, has_aux=True)(params, jax.tree.map(lambda x: x[None], row))
            return jax.tree.map(lambda g: jnp.sum(jnp.square(g.astype(at_least_single(g.dtype)))), grads)

        (loss, aux), grads = jax.value_and_grad(whole, has_aux=True)(params, batch)
        norms = jax.vmap(squares)(jax.tree.map(lambda x: jnp.asarray(x)[:sampled], batch))
        return (loss, aux) if has_aux else loss, grads, norms

    return loss_grads_and_norms


def _check_parameters(params: Any, start: str) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            name = jax.tree_util.keystr(path) or "params"
            raise CollectiveError(
                f"{start}parameter {name} is of dtype {jnp.result_type(leaf)}, but only floats have gradients. Keep "
                "counters, keys and other arrays that are not trained out of the first argument."
            )


def _number_of_examples(batch: Any, start: str) -> int:
    lengths = {jax.tree_util.keystr(p): jnp.shape(x)[:1] for p, x in jax.tree_util.tree_leaves_with_path(batch)}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        found = [f"{name or 'batch'}: {length[0] if length else 'a scalar'}" for name, length in lengths.items()]
        raise CollectiveError(
            f"{start}the arrays of the batch must have the examples along their first axis, and have lengths "
            f"{', '.join(found) or '(there are no arrays)'}. "
            "Pass values that are equal for all examples as further arguments: loss_fn(params, batch, *others)."
        )
    ((examples,),) = set(lengths.values())
    return int(examples)
