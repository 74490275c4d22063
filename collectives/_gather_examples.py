"""`gather_examples`: a row for each example of the step, on every worker, with a derivative.

A worker writes its rows into zeros, at the place of its examples in the step's global batch, and the arrays are summed.
So the result does not depend on how the batch is split, and a microbatch counts like a worker.

In reverse mode, with w_i examples of W on worker i, L_i the mean loss of its examples, and g the gathered rows,

    dL/dx_j = sum_i w_i / W  dL_i/dg [rows of j]

Gradients are averaged over examples, with weight w_j / W for worker j, so worker j continues with W / w_j times this.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from adaptive import BatchSizeError
from adaptive.base.process.source_lines import at, current_line
from adaptive.base.values.numbers import whole
from adaptive.operators.collectives import collective
from adaptive.operators.context import tracing
from adaptive.operators.sources import EXAMPLES, OFFSET, Reading, Source, read

from ._leaves import error, known_capacity, leaves_of
from ._reduce import Reduce

T = TypeVar("T")

_BOOLEAN = "boolean, of which there is no sum. Convert it:\n    comm.gather_examples(x.astype(jnp.int32), size)"


def gather_examples(tree: T, size: int) -> T:
    """Gather the rows of all examples of the step on every worker, in the order of the global batch.

    For losses that compare examples with all others of the batch, as contrastive losses do. In contrast to
    `all_gather`, the workers' batches may have different sizes, may change, and may run as microbatches; and the result
    can be differentiated, in reverse mode. The gradient is that of the whole batch on any split, if the loss is a
    mean over the worker's examples and gradients are averaged over examples: the default of `all_reduce`.

    Sends the bytes of `size` rows from each worker, twice if it is differentiated. The backward pass starts when all
    rows have arrived, so messages of the three passes are sent one after another.

    Args:
      tree: a pytree of arrays whose leading axis is the examples of the driver's batch. Local.
      size: the global batch: the number of rows of the result. It is part of the compiled step, so the global batch
        must stay as it is. Sizes of the workers' batches may change.

    Returns:
      `tree` with leaves of shape `(size, *shape[1:])`. Row i is that of example i of the step. Replicated.

    Raises:
      CollectiveError: a leaf has another leading axis, or cannot be sent; or this is called outside a driver, as by
        `program.evaluate`, with several workers.
      BatchSizeError: `size` is not a positive integer; or, in a step, it is not the global batch.

    Example:
      >>> def loss_fn(params, batch):                                    # doctest: +SKIP
      ...     image, text = encode(params, batch)                        # shape=(examples, features)
      ...     images, texts = comm.gather_examples((image, text), size=512)
      ...     own = (image * text).sum(-1)                               # an image with its own text
      ...     by_image = jax.nn.logsumexp(image @ texts.T, -1) - own     # the text of each image, among all
      ...     by_text = jax.nn.logsumexp(text @ images.T, -1) - own
      ...     return (by_image + by_text).mean() / 2

    References:
      Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision" (the loss above).
    """
    rows = whole(size)
    if rows is None or rows < 1:
        raise BatchSizeError(
            f"gather_examples{at(current_line())}: size= is the global batch, 1 or more; got {size!r}."
        )
    leaves = leaves_of("gather_examples", tree, lambda dtype: _BOOLEAN if dtype == jnp.bool_ else None)
    trace = tracing()
    if trace is None and (known_capacity() or 1) > 1:
        raise error("gather_examples", "outside a driver, with several workers, the order of the examples is unknown.")
    examples = rows if trace is None else trace.examples
    for name, leaf in leaves.items():
        if leaf.shape[:1] != (examples,):
            raise error(
                "gather_examples",
                f"{name or 'the value'} has shape {leaf.shape}; it must have {examples} rows, one for each example.",
            )
    total, offset = read(_rows_of_step(rows, at(current_line()))), read(OFFSET)
    # The minimum is the offset: it makes steps without a derivative read `total` too, so that it is compared.
    gathered = [_gathered(rows, examples, leaf, jnp.minimum(offset, total), total) for leaf in leaves.values()]
    return jax.tree.unflatten(jax.tree.structure(tree), gathered)


@cache  # one object for each call in a driver, because sources are compared by identity
def _rows_of_step(rows: int, where: str) -> Source:
    """Return a source of the global batch, which raises a BatchSizeError in a step with another one than `rows`."""

    def checked(reading: Reading) -> int:
        if reading.global_batch != rows:
            raise BatchSizeError(
                f"gather_examples(size={rows}){where}: this step has {reading.global_batch} examples. The result has "
                f"one row for each, so the global batch must be size= in every step: global_batch={rows}, without a "
                "policy or a rescale() that changes it. shares= may change."
            )
        return rows

    return Source(f"global batch of {rows}{where}", checked, np.int32, scope="all", stand_in=rows)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(rows: int, examples: int, leaf: jax.Array, offset: jax.Array, total: jax.Array) -> jax.Array:
    """Return the rows of all examples.

    Args:
      rows, total: the global batch, as a number and in this step.
      examples: rows of `leaf`.
      offset: the place of its first row.
    """
    # With room for all rows of `leaf`: a kernel may be traced for more examples than a step has.
    room = jnp.zeros((rows + examples, *leaf.shape[1:]), leaf.dtype)
    placed = jax.lax.dynamic_update_slice_in_dim(room, leaf, offset, axis=0)[:rows]
    return collective(Reduce("sum"), [placed])[0]


def _forward(rows: int, examples: int, leaf: jax.Array, offset: jax.Array, total: jax.Array) -> tuple[jax.Array, Any]:
    return _gathered(rows, examples, leaf, offset, total), (offset, total)


def _backward(rows: int, examples: int, kept: Any, cotangent: jax.Array) -> tuple[jax.Array | None, None, None]:
    offset, total = kept
    if cotangent.dtype == jax.dtypes.float0:  # of integers
        return None, None, None
    mean = collective(Reduce("mean"), [cotangent], weight=read(EXAMPLES))[0]
    room = jnp.zeros((examples, *mean.shape[1:]), mean.dtype)
    own = jax.lax.dynamic_slice_in_dim(jnp.concatenate([mean, room]), offset, examples, axis=0)
    dtype = own.dtype if jnp.finfo(own.dtype).bits >= 32 else jnp.float32  # float16 ends at 65504 examples
    return (own.astype(dtype) * (total.astype(dtype) / examples)).astype(own.dtype), None, None


_gathered.defvjp(_forward, _backward)
