"""`all_reduce`: a mean over all examples, or a sum, maximum or minimum over the workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from adaptive.operators.sources import EXAMPLES, read

from ._islands import checked_islands
from ._leaves import combine, error, known_capacity, leaves_of
from ._reduce import Op, Reduce, checked_weight, gate, problem_of
from ._robust import Robust, robust_of, robustly
from .compression._coded import in_codes
from .compression._wire import Narrow, Rounding, Wire, check_format, codec_of

T = TypeVar("T")


def all_reduce(
    tree: T,
    *,
    op: Op | Literal["median"] | Robust = "mean",
    weight: ArrayLike | None = None,
    when: ArrayLike | None = None,
    nonfinite: Literal["drop"] | None = None,
    wire: Wire | None = None,
    rounding: Rounding = "nearest",
    hosts: Iterable[Iterable[int]] | None = None,
) -> T:
    """Combine values over all workers.

    A mean is over examples, not over workers. With `w_i` examples on worker i it is

        sum_i w_i x_i / sum_i w_i

    The mean of the workers' gradients is therefore the gradient of the mean loss over all examples, however these are
    split among workers (Chen et al. 2020, equation 2; Tyagi and Sharma 2020, equation 3).

    Sends the leaves' bytes (half precisions are sent as float32). A mean also sends its weight, one scalar, which all
    means with the same weight share. Collectives that are ready at the same time share a message. A value that is
    already replicated is not sent.

    A worker without examples, or with weight zero, contributes nothing. If the weights of all workers are zero, a mean
    is 0 / 0. For this case, and for contributions or sums that are not finite, the program's `nonfinite=` selects one
    of: raise an error, skip the step, or return NaN.

    Args:
      tree: a pytree of arrays and numbers, each of the same shape on all workers. Local.
      op: "mean", "sum", "max" or "min", over the workers that have examples in this step. A sum of a replicated value
        is the value times `ad.num_workers()`. A NaN on any worker makes the result NaN. "mean" accepts floats and
        complex numbers; "sum" also integers, which may overflow as in JAX; "max" and "min" floats and integers.
        Or, for floats, a reduction that is robust against a few bad workers: "median", `comm.trimmed_mean(1)`,
        `comm.geometric_median()`. These reduce the workers' means over their own examples, weighted by `weight`.
      weight: a scalar `w_i` to use instead of the number of examples, such as a number of tokens. For means and robust
        reductions; with 1, all workers count equally. Local.
      when: a boolean scalar that is known before the step: a hyperparameter, or computed from
        `ad.step_number()`. In steps in which it is false nothing is sent, and each worker gets the result over
        itself alone. Replicated.
      nonfinite: "drop" excludes from a mean each contribution with a non-finite value in any leaf, and its examples. A
        contribution is that of one microbatch of a worker. By default the program's `nonfinite=` applies.
      wire: the number format in which a mean or sum is sent; by default the leaf's own.
        `jnp.bfloat16` and `jnp.float16` halve the bytes; sums are computed in single precision. float16 overflows
        above 65504: a mean over examples sends nothing larger than its values, but with `weight=` the products of
        weight and value, and for a sum the sum, must fit. bfloat16 has the range of float32.
        "8bit", "4bit" and "2bit" compress: the tree is sent as one float32 vector in blocks of 2048 numbers with a
        scale of four bytes each. Each worker sums one slice of the vector in single precision and compresses the sum
        again.
      rounding: how to round to `wire`: "nearest"; "stochastic", unbiased, for bfloat16 and bits; or "error_feedback",
        for bits: each worker adds its rounding error to the value that it sends next. The error is kept per worker:
        zero on a joining worker, lost with a lost one, unaffected by changes of batch size, and part of checkpoints.
      hosts: for compressed formats: the workers of each host, such as [[0, 1], [2, 3]] or `comm.by_host(world)`. Values
        are then combined exactly within a host, and one worker of each host rounds and sends. Other formats need no
        `hosts=`.

    Returns:
      `tree` with each leaf reduced, of its shape and dtype. Replicated; with `when`, local, because workers differ in
      steps without sending.

    Raises:
      CollectiveError: a leaf, `op`, `weight` or another argument is invalid, or they do not go together; or a mean
        without `weight` outside a program with several workers.
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
    _check(op, weight, nonfinite, wire)
    leaves = leaves_of("all_reduce", tree, lambda dtype: problem_of(dtype, op))
    if not leaves:
        return tree
    scale: Any = None
    if op not in _WEIGHTLESS:
        scale = read(EXAMPLES) if weight is None else checked_weight(weight)
    go = gate("all_reduce", when)
    if isinstance(op, Robust) or op == "median":
        return robustly(robust_of(op), tree, leaves, scale, go)
    if nonfinite == "drop":
        leaves, scale = _only_finite(leaves, scale)
    codec = codec_of(wire)
    if hosts is not None and codec is None:
        raise error("all_reduce", 'hosts= is for compressed formats, such as  wire="4bit"; leave it out.')
    if wire is None:
        return combine(Reduce(op), tree, leaves, weight=scale, when=go)
    check_format("all_reduce", wire, rounding, [leaf.dtype for leaf in leaves.values()])
    if codec is not None:
        groups = None if hosts is None else checked_islands("all_reduce", hosts, known_capacity(), "hosts")
        return in_codes(codec, rounding, tree, leaves, scale, go, groups)
    how = Narrow(jnp.dtype(wire).name, rounding == "stochastic")
    if scale is not None and weight is None:
        scale = how.weight_of(scale)
    return combine(Reduce(op, how), tree, leaves, weight=scale, when=go)


_WEIGHTLESS = ("sum", "max", "min")


def _check(op: Any, weight: Any, nonfinite: Any, wire: Any) -> None:
    """Check the arguments' values and combinations.

    Raises:
      CollectiveError: an argument has an unsupported value, or one that `op` does not support.
    """
    if not isinstance(op, Robust) and op not in (*get_args(Op), "median"):
        raise error(
            "all_reduce",
            "op= must be 'mean', 'sum', 'max', 'min', 'median', comm.trimmed_mean(1) or comm.geometric_median(); got "
            f"{op!r}.",
        )
    if weight is not None and op in _WEIGHTLESS:
        raise error(
            "all_reduce",
            f"op={op!r} takes no weight=. Multiply first:\n"
            f"    comm.all_reduce(jax.tree.map(lambda x: weight * x, tree), op={op!r})",
        )
    if nonfinite not in (None, "drop"):
        raise error("all_reduce", f"nonfinite= must be 'drop' or None; got {nonfinite!r}.")
    if nonfinite and op != "mean":
        raise error("all_reduce", f"nonfinite='drop' is for means; op={op!r} cannot leave workers out.")
    if wire is not None and op not in ("mean", "sum"):
        raise error("all_reduce", f"wire= is for means and sums; op={op!r} supports no other format.")


def _only_finite(leaves: dict[str, jax.Array], weight: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return the leaves and their weight, or zeros for all of them if any value is not finite."""
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves.values()]).all()
    kept = {name: jnp.where(finite, leaf, jnp.zeros((), leaf.dtype)) for name, leaf in leaves.items()}
    return kept, jnp.where(finite, weight, jnp.zeros((), weight.dtype))
