"""The collectives that drivers are written with."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from adaptive import CollectiveError
from adaptive.extend import EXAMPLES, Op, at, brief, collective, current_line, current_world, read, tracing, whole

T = TypeVar("T")


def all_reduce(tree: T, *, op: Op = "mean", weight: ArrayLike | None = None) -> T:
    """Combine values over all workers.

    A mean is over examples, not over workers: with `w_i` for the number of examples of worker i, it is

        sum_i w_i x_i / sum_i w_i

    so that gradients of mean losses over uneven local batches average to the gradient of the mean over their union, on
    any split (Chen et al. 2020, equation 2; Tyagi and Sharma 2020, equation 3).

    Costs the leaves' bytes on the message (half precisions travel as float32), and for a mean one weight more, which
    all means of one weight share. Collectives that are ready at the same time share a message. Of a value that is
    replicated already it costs nothing.

    A worker whose weight is zero adds nothing; where the weights of all workers are zero it is a mean of nothing,
    0 / 0. What a program does about that, and about contributions and sums that are not finite, its `nonfinite=` says:
    raise, skip the step, or let the result be NaN.

    Args:
      tree: a pytree of arrays and numbers, each of the same shape on all workers. Local.
      op: "mean", "sum", "max" or "min". NaNs of any worker reach the result. Means are of floats and complex
        numbers; sums of integers too, which may overflow as they do in JAX; extremes of floats and integers.
      weight: for a mean, a scalar `w_i` other than the number of examples: a number of tokens, say. Local.

    Returns:
      `tree` with each leaf reduced, of its shape and dtype. Replicated.

    Raises:
      CollectiveError: for leaves, operations and weights that have no such result, and, outside a program with several
        workers, for a mean with no `weight`.
      NonFiniteError: outside a program, for a mean whose weights are all zero.

    Example:
      >>> import jax, jax.numpy as jnp, collectives as comm
      >>> def driver(w, batch):
      ...     loss, grad = jax.value_and_grad(lambda w: ((batch["x"] * w - batch["y"]) ** 2).mean())(w)
      ...     loss, grad = comm.all_reduce((loss, grad))
      ...     return w - 0.1 * grad, {"loss": loss}
      >>> w, metrics = driver(1.0, {"x": jnp.ones(4), "y": jnp.zeros(4)})  # outside a program: one worker
      >>> print(w, metrics["loss"])
      0.8 1.0
    """
    if op not in get_args(Op):
        raise _error("all_reduce", f"op={op!r} is none of 'mean', 'sum', 'max', 'min'.")
    if weight is not None and op != "mean":
        raise _error(
            "all_reduce",
            f"op={op!r} takes no weight=. Multiply before:\n"
            f"    comm.all_reduce(jax.tree.map(lambda x: weight * x, tree), op={op!r})",
        )
    scale = None if weight is None else _weight(weight)
    leaves = _leaves("all_reduce", tree, op)
    if op == "mean" and scale is None and leaves:
        scale = read(EXAMPLES)
    return _combine(tree, leaves, "reduce", op=op, weight=scale)


def all_gather(tree: T) -> T:
    """Show every worker what all the workers have.

    Costs, per leaf, its bytes times the number of workers on the message: each worker fills its row, and rows are
    summed. Meant for scalars and small arrays, such as seconds of each worker.

    Args:
      tree: a pytree of arrays and numbers, each of the same shape on all workers. Local.

    Returns:
      `tree` with each leaf of shape `(workers, *shape)`: row i is worker i's. Replicated.

    Raises:
      CollectiveError: for leaves that cannot be sent.

    Example:
      >>> import collectives as comm
      >>> print(comm.all_gather(2.5))  # outside a program: one worker
      [2.5]
    """
    return _combine(tree, _leaves("all_gather", tree), "gather")


def broadcast(tree: T, root: int = 0) -> T:
    """Give every worker what one of them has.

    Costs the leaves' bytes on the message: the others add zeros.

    Args:
      tree: a pytree of arrays and numbers, each of the same shape on all workers. Local.
      root: the number of the worker whose values are taken.

    Returns:
      `tree` with the root's leaves. Replicated.

    Raises:
      CollectiveError: for leaves that cannot be sent, and where there is no worker `root`.

    Example:
      >>> import jax, collectives as comm
      >>> order = comm.broadcast(jax.random.permutation(jax.random.key(0), 4))
      >>> sorted(order.tolist())
      [0, 1, 2, 3]
    """
    number, workers = whole(root), _known_workers()
    if number is None:
        raise _error("broadcast", f"root={root!r} must be an integer known while tracing: a worker's number.")
    if number < 0 or (workers is not None and number >= workers):
        there = "workers are numbered from 0" if workers is None else f"the workers are 0 to {workers - 1}"
        raise _error("broadcast", f"there is no worker root={brief(number)}: {there}.")
    return _combine(tree, _leaves("broadcast", tree), "broadcast", root=number)


def _combine(
    tree: T, leaves: dict[str, jax.Array], kind: Literal["reduce", "gather", "broadcast"], **options: Any
) -> T:
    if not leaves:
        return tree
    results = collective(kind, list(leaves.values()), names=list(leaves), **options)
    return jax.tree.unflatten(jax.tree.structure(tree), results)


def _leaves(what: str, tree: Any, op: Op | None = None) -> dict[str, jax.Array]:
    """The tree's leaves, as arrays, by their paths; or an error that names the first one that cannot be sent."""
    leaves = {}
    for path, value in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        problem = _problem(value) or _problem_of_dtype(jnp.asarray(value).dtype, op)
        if problem:
            raise _error(what, f"{name or 'the value'} is {problem}")
        leaves[name] = jnp.asarray(value)
    return leaves


def _problem(value: Any) -> str | None:
    """Why `value` cannot be sent at all, and what to write instead."""
    dtype = getattr(value, "dtype", None)
    if dtype == jax.dtypes.float0:
        return (
            "the gradient of an integer (float0), which holds nothing. Differentiate with respect to floats alone, or "
            "leave it out of the tree."
        )
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return (
            "a PRNG key. Send what it is made of:\n"
            "    jax.random.wrap_key_data(comm.broadcast(jax.random.key_data(key)))"
        )
    try:
        jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        text = str(error).splitlines()[0] if isinstance(error, OverflowError) else "neither an array nor a number"
        return f"{value!r}: {text}. Leave it out of the tree."
    return None


def _problem_of_dtype(dtype: Any, op: Op | None) -> str | None:
    """Why values of `dtype` have no such reduction, and what to write instead."""
    if op is None:
        return None
    if dtype == jnp.bool_:
        return (
            f"boolean, of which there is no {op}. Say what to count:\n"
            "    comm.all_reduce(x.astype(jnp.int32), op='sum')     on how many workers it is true\n"
            "    comm.all_reduce(x.astype(jnp.int32), op='max')     whether it is true on any"
        )
    if op == "mean" and jnp.issubdtype(dtype, jnp.integer):
        return (
            f"{dtype}, of which a mean would be rounded. Write one of\n"
            "    comm.all_reduce(x, op='sum')\n"
            "    comm.all_reduce(x.astype(jnp.float32))"
        )
    if op in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        return f"{dtype}, of which there is no {op}. Reduce real numbers:\n    comm.all_reduce(jnp.abs(z), op={op!r})"
    return None


def _weight(weight: ArrayLike) -> jax.Array:
    """A weight as a floating scalar, of single precision at least."""
    try:
        w = jnp.asarray(weight)
    except TypeError:
        raise _error("all_reduce", f"weight={weight!r} is no number.") from None
    real = jnp.issubdtype(w.dtype, jnp.floating) or jnp.issubdtype(w.dtype, jnp.integer)
    if w.shape != () or not real:
        raise _error(
            "all_reduce",
            f"weight= must be one real number per worker, but is {w.dtype}{list(w.shape)}. Sum it over the batch:\n"
            "    comm.all_reduce(x, weight=mask.astype(jnp.float32).sum())",
        )
    if not isinstance(w, jax.core.Tracer) and not 0 <= float(w) < float("inf"):
        raise _error("all_reduce", f"weight={w} must be finite, and not negative.")
    return w if jnp.issubdtype(w.dtype, jnp.floating) and w.dtype.itemsize >= 4 else w.astype(jnp.float32)


def _known_workers() -> int | None:
    trace, world = tracing(), current_world.get()
    return trace.workers if trace else world.size if world else None


def _error(what: str, text: str) -> CollectiveError:
    return CollectiveError(f"{what}{at(current_line())}: {text}")
