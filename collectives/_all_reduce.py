"""`all_reduce`: a mean over all examples, or a sum, maximum or minimum over the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from adaptive.extend import EXAMPLES, Collective, read

from ._leaves import combine, error, leaves_of

T = TypeVar("T")
Op = Literal["mean", "sum", "max", "min"]


def all_reduce(tree: T, *, op: Op = "mean", weight: ArrayLike | None = None, when: ArrayLike | None = None) -> T:
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
      when: a boolean scalar that is known before the step: a hyper-parameter, or made of `ad.step()`. In steps in which
        it is false nothing is sent, and each worker gets what it would if it were alone. Replicated.

    Returns:
      `tree` with each leaf reduced, of its shape and dtype. Replicated; with `when`, local, since it may not have been
      sent.

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
        raise error("all_reduce", f"op={op!r} is none of 'mean', 'sum', 'max', 'min'.")
    if weight is not None and op != "mean":
        raise error(
            "all_reduce",
            f"op={op!r} takes no weight=. Multiply before:\n"
            f"    comm.all_reduce(jax.tree.map(lambda x: weight * x, tree), op={op!r})",
        )
    scale = None if weight is None else _weight(weight)
    leaves = leaves_of("all_reduce", tree, lambda dtype: _problem_of(dtype, op))
    if op == "mean" and scale is None and leaves:
        scale = read(EXAMPLES)
    return combine(Reduce(op), tree, leaves, weight=scale, when=gate("all_reduce", when))


def gate(what: str, when: ArrayLike | None) -> jax.Array | None:
    """Whether a collective sends in this step, as its primitive takes it."""
    if when is None or (isinstance(when, bool) and when):
        return None
    try:
        value = jnp.asarray(when)
    except TypeError:
        raise error(what, f"when={when!r} is neither true nor false.") from None
    if value.shape != () or value.dtype != jnp.bool_:
        raise error(
            what,
            f"when= must be one boolean, but is {value.dtype}{list(value.shape)}. Write a comparison:\n"
            "    when=ad.step() % 8 == 0",
        )
    return value


@dataclass(frozen=True)
class Reduce(Collective):
    """One value of those of all workers."""

    operation: Op = "mean"

    name = "all_reduce"
    reduces = True

    @property
    def op(self) -> Literal["sum", "max", "min"]:
        return "sum" if self.operation == "mean" else self.operation

    @property
    def weighted(self) -> bool:
        return self.operation == "mean"

    @property
    def is_linear(self) -> bool:  # type: ignore[override]
        return self.op == "sum"

    def of_replicated(self, x: jax.Array, workers: int) -> jax.Array:
        return x * workers if self.operation == "sum" else x

    @property
    def label(self) -> str:
        return self.operation

    @property
    def about(self) -> str:
        return f"all_reduce(op={self.operation!r})"


def problem_of_mean(dtype: Any) -> str | None:
    """Why values of `dtype` have no mean, and what to write instead."""
    return _problem_of(dtype, "mean")


def _problem_of(dtype: Any, op: Op) -> str | None:
    """Why values of `dtype` have no such reduction, and what to write instead."""
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
        raise error("all_reduce", f"weight={weight!r} is no number.") from None
    real = jnp.issubdtype(w.dtype, jnp.floating) or jnp.issubdtype(w.dtype, jnp.integer)
    if w.shape != () or not real:
        raise error(
            "all_reduce",
            f"weight= must be one real number per worker, but is {w.dtype}{list(w.shape)}. Sum it over the batch:\n"
            "    comm.all_reduce(x, weight=mask.astype(jnp.float32).sum())",
        )
    if not isinstance(w, jax.core.Tracer) and not 0 <= float(w) < float("inf"):
        raise error("all_reduce", f"weight={w} must be finite, and not negative.")
    return w if jnp.issubdtype(w.dtype, jnp.floating) and w.dtype.itemsize >= 4 else w.astype(jnp.float32)
