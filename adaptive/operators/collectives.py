"""Collectives: values combined over all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from adaptive.base.current import current_world
from adaptive.base.errors import CollectiveError
from adaptive.base.where import at, current_line, line_search_of

from .context import only_in_programs, tracing
from .eager import exchange_eagerly

Op = Literal["mean", "sum", "max", "min"]

collective_p = Primitive("collective")
collective_p.multiple_results = True
only_in_programs(collective_p)


def collective(
    kind: Literal["reduce", "gather", "broadcast"],
    leaves: Sequence[jax.Array],
    *,
    op: Op = "sum",
    weight: jax.Array | None = None,
    root: int = 0,
    names: Sequence[str] = (),
) -> list[jax.Array]:
    """Combine `leaves` over all workers: the primitive behind everything in `collectives`.

    Args:
      kind: "reduce" (by `op`), "gather" (one row per worker on a new leading axis) or "broadcast" (the root's value).
      leaves: arrays of any shape; local or replicated.
      op: for a reduction. "mean" is `sum_i w_i x_i / sum_i w_i`.
      weight: scalar `w_i`; for "mean" only.
      root: the worker whose value is broadcast.
      names: what to call each leaf in messages and errors.

    Returns:
      One replicated array per leaf.
    """
    trace, world = tracing(), current_world.get()
    n_workers = trace.workers if trace else world.size if world else 1
    # An empty leaf is its own result, and equal on all workers: nothing of it is sent.
    sent = [i for i, leaf in enumerate(leaves) if leaf.size]
    operands = [leaves[i] for i in sent] + ([weight] if op == "mean" and kind == "reduce" else [])
    params = {"kind": kind, "op": op if kind == "reduce" else "sum", "root": root, "workers": n_workers}
    named = tuple(names[i] for i in sent) if names else ()
    results = iter(collective_p.bind(*operands, names=named, **params) if sent else ())
    rows = (n_workers,) if kind == "gather" else ()
    return [next(results) if leaf.size else jnp.zeros((*rows, *leaf.shape), leaf.dtype) for leaf in leaves]


def n_values(params: dict[str, Any], n_operands: int) -> int:
    """How many of a collective's operands are values; the weight, where there is one, comes behind them."""
    return n_operands - (params["kind"] == "reduce" and params["op"] == "mean")


@collective_p.def_abstract_eval
def _collective_abstract(*operands, **params):
    values = operands[: n_values(params, len(operands))]
    if params["kind"] != "gather":
        return [jax.core.ShapedArray(v.shape, v.dtype) for v in values]
    return [jax.core.ShapedArray((params["workers"], *v.shape), v.dtype) for v in values]


@collective_p.def_impl
def _collective_eager(*operands, kind, op, root, names, workers):
    values = operands[: n_values({"kind": kind, "op": op}, len(operands))]
    weight = operands[-1] if len(values) < len(operands) else None
    return exchange_eagerly(kind, values, op=op, weight=weight, root=root)


def _collective_jvp(primals, tangents, **params):
    # Linear in its values, so tangents are combined as values are: with the same weights. A weight that itself is
    # differentiated, and the extremes, have no such rule.
    n = n_values(params, len(primals))
    moving_weight = n < len(primals) and not isinstance(tangents[-1], ad.Zero)
    if params["op"] in ("max", "min") or moving_weight:
        what = "its weight" if moving_weight else f"op={params['op']!r}"
        raise CollectiveError(
            f"all_reduce cannot be differentiated with respect to {what}{at(current_line())}. "
            "Differentiate the local value and reduce the gradient."
        )
    dense = [ad.instantiate_zeros(t) for t in tangents[:n]]
    return collective_p.bind(*primals, **params), collective_p.bind(*dense, *primals[n:], **params)


def _collective_transpose(cotangents, *operands, **params):
    kind = {"reduce": "all_reduce", "gather": "all_gather"}.get(params["kind"], params["kind"])
    raise CollectiveError(  # JAX transposes an equation in the place of the driver that it stems from
        f"reverse-mode differentiation through a collective: jax.grad of a function that calls comm.{kind}"
        f"{at(current_line())}. Each "
        "worker would get only its own share of the gradient. Differentiate the local loss, then reduce:\n"
        "    loss, grads = jax.value_and_grad(local_loss)(params, batch)\n"
        "    grads = comm.all_reduce(grads)" + line_search_of(source_info_util.current())
    )


def _collective_batch(operands, dims, *, kind, **params):
    n = n_values({"kind": kind, **params}, len(operands))
    if n < len(operands) and dims[-1] is not None:
        raise CollectiveError(
            f"all_reduce: weight= must be one scalar per worker, not mapped by vmap{at(current_line())}."
        )
    results = collective_p.bind(*operands, kind=kind, **params)
    moved = [d if d is None or kind != "gather" else d + 1 for d in dims[:n]]  # None: not mapped
    return results, moved


ad.primitive_jvps[collective_p] = _collective_jvp
ad.primitive_transposes[collective_p] = _collective_transpose
batching.primitive_batchers[collective_p] = _collective_batch
