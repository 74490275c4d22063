"""`all_reduce`: a mean over all examples, or a sum, maximum or minimum over the workers."""

from __future__ import annotations

from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from adaptive.extend import EXAMPLES, read

from ._coded import check_coded, in_codes
from ._codes import Codec, codec_of
from ._leaves import combine, error, leaves_of
from ._reduce import Op, Reduce, checked_weight, gate, problem_of
from ._robust import Robust, robust_of, robustly
from ._wire import Rounding, Wire, narrow, with_feedback

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
) -> T:
    """Combine values over all workers.

    A mean is over examples, not over workers. With `w_i` examples on worker i it is

        sum_i w_i x_i / sum_i w_i

    so that gradients of mean losses over uneven local batches average to the gradient of the mean over their union, on
    any split (Chen et al. 2020, equation 2; Tyagi and Sharma 2020, equation 3).

    Sends the leaves' bytes (half precisions travel as float32), and for a mean one scalar more, which all means with
    the same weight share. Collectives that are ready at the same time share a message. For a value that is already
    replicated nothing is sent.

    A worker without examples, or with weight zero, contributes nothing. If the weights of all workers are zero, a mean
    is 0 / 0. The program's `nonfinite=` decides what happens then, and with contributions or sums that are not finite:
    raise, skip the step, or let the result be NaN.

    Args:
      tree: a pytree of arrays and numbers, each of the same shape on all workers. Local.
      op: "mean", "sum", "max" or "min", over the workers that take part in the step: those that take examples. A sum of
        a replicated value counts them, too: it is the value times `ad.workers()`. NaNs of any worker reach the result.
        Means are of floats and complex numbers; sums of integers too, which may overflow as they do in JAX; extremes
        of floats and integers.
        Or, for floats, a reduction that is robust against a few bad workers: "median", `comm.trimmed_mean(1)`,
          `comm.geometric_median()`.
        Each worker's value is then the mean over its own examples, and has its weight as its vote.
      weight: for a mean, a scalar `w_i` other than the number of examples: a number of tokens, say. Local. For a
        median, 1 gives each worker one vote.
      when: a boolean scalar that is known before the step: a hyper-parameter, or made of `ad.step()`. In steps in which
        it is false nothing is sent, and each worker gets what it would if it were alone. Replicated.
      nonfinite: "drop" leaves out of a mean, with their examples, contributions that are not finite in all leaves: of a
        worker, or of the one kernel call of a worker that they come from. By default the program's `nonfinite=` says
        what is done.
      wire: a format in which a mean or sum travels both ways. Of two bytes, `jnp.bfloat16` or `jnp.float16`: half the
        bytes. It is added up in single precision. By default everything travels as it is. float16 ends at 65504: of a
        mean over examples nothing larger than the values travels, but with `weight=` the product of weight and value,
        and for a sum the sum, must stay below. bfloat16 has the range of float32.
        Or a compressed format: "8bit", "4bit" or "2bit", or `comm.top_k(k)`, which sends a few numbers of each block.
        Blocks of 2048 numbers share a scale of four bytes. Each worker sums a slice of the codes in single precision,
        and the sums are coded again; what `top_k` selects is gathered. The tree is one vector, in the range of float32.
      rounding: to that format: "nearest"; "stochastic", right on average, for bfloat16 and for bits; or
        "error_feedback": each worker adds what was lost to what it sends the next time. The lost part is per worker:
        zero on a joining worker, gone with a lost one, kept through other batch sizes, and part of checkpoints.

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
    if codec is not None:
        check_coded(codec, rounding, [leaf.dtype for leaf in leaves.values()], op)
        return in_codes(codec, rounding, tree, leaves, scale, go)
    assert not isinstance(wire, Codec)
    how = None if wire is None else narrow(wire, rounding, [leaf.dtype for leaf in leaves.values()], op)
    if how is not None and scale is not None and weight is None:
        scale = how.weight_of(scale)
    if how is not None and rounding == "error_feedback":
        return with_feedback(how, tree, leaves, scale, go)
    return combine(Reduce(op, how), tree, leaves, weight=scale, when=go)


_WEIGHTLESS = ("sum", "max", "min")


def _check(op: Any, weight: Any, nonfinite: Any, wire: Any) -> None:
    """Check the arguments' values and combinations.

    Raises:
      CollectiveError: an argument is unknown, or does not go with `op`.
    """
    if not isinstance(op, Robust) and op not in (*get_args(Op), "median"):
        raise error(
            "all_reduce",
            f"op={op!r} is none of 'mean', 'sum', 'max', 'min', 'median', comm.trimmed_mean(1), "
            "comm.geometric_median().",
        )
    if weight is not None and op in _WEIGHTLESS:
        raise error(
            "all_reduce",
            f"op={op!r} takes no weight=. Multiply before:\n"
            f"    comm.all_reduce(jax.tree.map(lambda x: weight * x, tree), op={op!r})",
        )
    if nonfinite not in (None, "drop"):
        raise error("all_reduce", f"nonfinite={nonfinite!r} is neither 'drop' nor None.")
    if nonfinite and op != "mean":
        raise error("all_reduce", f"nonfinite='drop' is for means; op={op!r} cannot leave workers out.")
    if wire is not None and (isinstance(op, Robust) or op == "median"):
        raise error("all_reduce", f"wire= is for means and sums; op={op!r} supports no other format.")


def _only_finite(leaves: dict[str, jax.Array], weight: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Return contributions and their weight, or zeros if any of them is not finite."""
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves.values()]).all()
    kept = {name: jnp.where(finite, leaf, jnp.zeros((), leaf.dtype)) for name, leaf in leaves.items()}
    return kept, jnp.where(finite, weight, jnp.zeros((), weight.dtype))
