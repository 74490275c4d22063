"""Squared gradient norms of single examples, beside the gradient itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from adaptive import CollectiveError
from adaptive.base.source_lines import at, current_line
from adaptive.operators.context import tracing

from ._example_axes import SAME, Interacting
from ._example_squares import Chosen, example_squares
from ._example_trace import MixedExamples, differentiate
from ._norm_layers import EstimatedNorms, estimated_squares, no_norm_layers, norm_layer_leaves
from ._squares import at_least_single

Method = Literal["layers", "vmap"]


def example_norms(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    method: Method = "layers",
    sample: int | None = None,
    full_every: int = 1,
) -> Callable[..., tuple[Any, Any, Any]]:
    """Return a function that computes loss, gradient and each example's squared gradient norm.

    Takes the place of `jax.value_and_grad`, for `loss_fn(params, batch, *others)` that returns the mean loss over the
    examples of `batch`. The loss may be written in plain JAX, with flax (linen, or nnx split into a graph definition
    and parameters) or equinox; the model needs no change.

    `method="layers"`: the norms follow from each layer's inputs and the derivatives by its outputs, which the backward
    pass computes anyway (Goodfellow 2015; Gray et al. 2024). Matrix products, convolutions, lookups, biases and scales
    of norm layers are exact. The loss is evaluated equation by equation, with jitted and checkpointed functions in
    place. Loops (`scan`, `while`, `cond`) that use parameters are refused, and so is every loss whose examples are not
    known to be independent, such as one with batch normalization.

    `method="vmap"`: the norms come from `jax.vmap(jax.grad(loss_fn))` over batches of one example. Works for any loss
    that is a mean over independent examples, which is not verified; needs memory for a gradient per example.

    The norms of layers that are applied once per example cost little. Those of layers that are applied to each token of
    a text cost up to a fourth of a step. Two options lower this cost:

    `full_every=100` computes the norms of norm layers in each step, and those of all layers in every hundredth step and
    at shorter intervals before, with a second evaluation of the loss. In between, a leaf's norms are estimated as those
    of the norm layers times a ratio that was measured in these steps (`_norm_layers.py`). Norm layers are recognized by
    their scale, a parameter that multiplies the values of examples elementwise. The last eight measurements are
    operator state; they add 4 bytes per leaf to the message. The bounds of `noise_scale` contain the ratio's error.

    `sample=4` computes the norms of four examples of each microbatch. `noise_scale` remains unbiased, and its bounds
    become wider. Works for models without norm layers, too.

    Args:
      loss_fn: a function `loss_fn(params, batch, *others)` that returns the loss, a scalar. The arrays of `batch` have
        the examples along their first axis; `others` are equal for all examples, such as statistics or random keys.
      has_aux: whether `loss_fn` returns `(loss, aux)`. `aux` may be anything, also a mean over the batch.
      method: "layers" or "vmap".
      sample: compute norms of this many examples only, the first of the batch, or of all if there are fewer. The
        examples within a batch must be in random order, as they are when a program shuffles its data.
      full_every: compute the norms of all layers in every this many steps, and estimate them from the norm layers in
        between. 1: in each step. Only with method="layers".

    Returns:
      A function of the same arguments that returns `(loss, grads, norms)` or `((loss, aux), grads, norms)`. `norms` has
      the structure of `params`; each leaf has shape=(examples,), or shape=(min(sample, examples),); float32 or better,
      in gradient units squared: the squared norm of an example's gradient by that leaf. The mean of all examples'
      gradients is `grads`. All local. With `full_every` above 1, `norms` is an `EstimatedNorms` with such a pytree as
      `norms.norms`.

    Raises:
      CollectiveError: an option is invalid; or, when called: `params` has a leaf that is not a float, the arrays of the
        batch differ in length, `loss_fn` is not a mean over examples that depend on parameters in a known way, or
        `full_every` is above 1 and the model has no norm layers.

    Example:
      >>> loss, grads, norms = mon.example_norms(loss_fn)(params, batch)          # doctest: +SKIP
      >>> avg_grads = comm.all_reduce(grads)                                      # doctest: +SKIP
      >>> noise = mon.noise_scale(grads, avg_grads, per_example=norms)            # doctest: +SKIP

    References:
      Goodfellow 2015, "Efficient per-example gradient computations".
      Gray et al. 2024, "Normalization layer per-example gradients are sufficient to predict gradient noise scale in
      transformers", sections 2 and 3.
    """
    _check_options(method, sample, full_every)

    def loss_grads_and_norms(params: Any, batch: Any, *others: Any) -> tuple[Any, Any, Any]:
        start = f"example_norms{at(current_line())}: "
        _check_parameters(params, start)
        examples = _number_of_examples(batch, start)
        chosen = Chosen(examples, examples if sample is None else min(sample, examples))
        if (trace := tracing()) is not None and examples == trace.examples:
            trace.sampled.add(chosen.sampled)  # so that `check_norms` tells a sample from norms of another batch

        def whole(params: Any, batch: Any) -> tuple[jax.Array, Any]:
            returned = loss_fn(params, batch, *others)
            loss, aux = returned if has_aux else (returned, None)
            if jnp.shape(loss) != ():
                raise CollectiveError(
                    f"{start}the loss must be a scalar, the mean over the batch, and has shape {jnp.shape(loss)}."
                )
            return loss, aux

        try:
            if method == "vmap":
                (loss, aux), grads, norms = _by_vmap(whole, params, batch, chosen)
            else:
                (loss, aux), grads, norms = _by_layers(whole, params, batch, chosen, full_every, start)
        except MixedExamples as error:
            raise CollectiveError(start + _refusal(error)) from None
        return (loss, aux) if has_aux else loss, grads, norms

    return loss_grads_and_norms


def _by_layers(
    loss_fn: Callable[..., Any], params: Any, batch: Any, chosen: Chosen, full_every: int, start: str
) -> tuple[Any, Any, Any]:
    leaves, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, params))
    rows, batch_tree = jax.tree.flatten(jax.tree.map(jnp.asarray, batch))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = [jax.tree_util.keystr(path) for path in paths]

    def flat(leaves: list[Any], rows: list[Any]) -> Any:
        return loss_fn(jax.tree.unflatten(tree, leaves), jax.tree.unflatten(batch_tree, rows))

    traced = differentiate(flat, leaves, rows, chosen.examples)

    def squares_of(indices: Sequence[int]) -> list[jax.Array]:
        return example_squares(traced, leaves, names, chosen, indices)

    def squares_afresh(indices: Sequence[int]) -> list[jax.Array]:
        return example_squares(differentiate(flat, leaves, rows, chosen.examples), leaves, names, chosen, indices)

    grads = jax.tree.unflatten(tree, traced.grads)
    if full_every == 1:
        return traced.outputs, grads, jax.tree.unflatten(tree, squares_of(range(len(leaves))))
    own = norm_layer_leaves(traced.uses, paths, leaves)
    if not own:
        raise no_norm_layers(start)
    squares, measured = estimated_squares(squares_of, squares_afresh, own, len(leaves), full_every)
    return traced.outputs, grads, EstimatedNorms(jax.tree.unflatten(tree, squares), measured, tuple(own))


def _by_vmap(loss_fn: Callable[..., Any], params: Any, batch: Any, chosen: Chosen) -> tuple[Any, Any, Any]:
    def one(row: Any) -> Any:
        alone = jax.tree.map(lambda x: x[None], row)
        grads = jax.grad(loss_fn, has_aux=True)(params, alone)[0]
        return jax.tree.map(lambda g: jnp.sum(jnp.square(g.astype(at_least_single(g.dtype)))), grads)

    outputs, grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
    return outputs, grads, jax.vmap(one)(jax.tree.map(lambda x: jnp.asarray(x)[: chosen.sampled], batch))


def _check_options(method: str, sample: int | None, full_every: int) -> None:
    wrong = ""
    if method not in ("layers", "vmap"):
        wrong = f'method={method!r} must be "layers" or "vmap"'
    elif sample is not None and not (isinstance(sample, int) and sample > 0):
        wrong = f"sample={sample!r} must be a positive integer, or None for all examples"
    elif not (isinstance(full_every, int) and full_every > 0):
        wrong = f"full_every={full_every!r} must be a positive integer"
    elif full_every > 1 and method == "vmap":
        wrong = 'full_every= needs method="layers"'
    if wrong:
        raise CollectiveError(f"example_norms{at(current_line())}: {wrong}.")


def _refusal(error: MixedExamples) -> str:
    if isinstance(error.layout, Interacting):
        return (
            f"per-example gradients do not follow from the layers of this loss: {error.layout.reason}. "
            "If the examples are independent of each other, write\n"
            '    mon.example_norms(loss_fn, method="vmap")\n'
            "Otherwise, as with batch normalization, there are no per-example gradients: leave out `per_example`."
        )
    what = "does not depend on the batch" if error.layout == SAME else "is not a sum over examples"
    return f"the loss {what}. Pass the batch as second argument, loss_fn(params, batch), and return the mean loss."


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
