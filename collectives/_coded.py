"""`all_reduce` in codes of a few bits: means and sums that travel compressed, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
from adaptive.extend import Collective, Gathered, Sliced, collective, operator_state

from ._all_gather import Gather
from ._codes import Codec, Coded
from ._leaves import combine, error
from ._local_mean import LocalMean, local_sum
from ._reduce import Reduce
from ._wire import Rounding

LABEL = "left by rounding"  # of the operator state


@dataclass(frozen=True)
class CodedSlices(Sliced):
    """Sum of coded blocks: each worker sums a slice of all workers' blocks in single precision, and codes it again."""

    codec: Codec
    stochastic: bool = False

    @property
    def granule(self) -> int:
        return self.codec.row_bytes

    def reduced(self, rows: jax.Array, statistics: Any, step: Any, number: Any) -> jax.Array:
        if len(rows) == 1 or not rows.size:
            return rows[0]
        blocks = rows.reshape(len(rows), -1, self.codec.row_bytes)
        total = reduce(jnp.add, (self.codec.decode(self.codec.of_rows(own)) for own in blocks))
        key = _key(1, step, number) if self.stochastic else None
        return self.codec.to_rows(self.codec.encode(total, key)).reshape(-1)


@dataclass(frozen=True)
class CodedSum(Collective):
    """Collective that sums coded blocks in slices. Operand and result: shape=(blocks, row_bytes), uint8."""

    slices: CodedSlices

    name = "all_reduce"
    is_linear = False

    @property
    def op(self) -> CodedSlices:
        return self.slices

    def of_replicated(self, x: jax.Array, taking_part: jax.Array) -> jax.Array:
        codec = self.slices.codec
        return codec.to_rows(codec.of_rows(x), taking_part.sum())

    @property
    def label(self) -> str:
        return "sum of codes"

    @property
    def about(self) -> str:
        return f"all_reduce(wire={self.slices.codec})"


@dataclass(frozen=True)
class GatherCodes(Gather):
    """Collective that gathers coded blocks: each worker sends its row alone. Rows of absent workers are zeros."""

    name = "all_reduce"
    label = "gathered codes"
    is_linear = False

    @property
    def op(self) -> Gathered:
        return Gathered()


def check_coded(codec: Codec, rounding: Any, dtypes: Sequence[Any], op: Any) -> None:
    """Check that codes go together with the other arguments of an `all_reduce`.

    Raises:
      CollectiveError: they do not.
    """
    if rounding not in get_args(Rounding):
        raise error("all_reduce", f"rounding={rounding!r} is none of 'nearest', 'stochastic', 'error_feedback'.")
    if codec.is_sparse and rounding != "error_feedback":
        raise error(
            "all_reduce",
            f"rounding={rounding!r} would lose what comm.top_k leaves out. Write\n"
            '    comm.all_reduce(x, wire=comm.top_k(…), rounding="error_feedback")',
        )
    if op not in ("mean", "sum"):
        raise error("all_reduce", f"wire= is for means and sums; op={op!r} supports no other format.")
    for dtype in dtypes:
        if not jnp.issubdtype(dtype, jnp.floating):
            raise error(
                "all_reduce", f"a compressed wire of {dtype}: only real floats are rounded. Reduce the others apart."
            )


def in_codes(
    codec: Codec,
    rounding: Rounding,
    tree: Any,
    leaves: dict[str, jax.Array],
    weight: jax.Array | None,
    when: jax.Array | None,
) -> Any:
    """Reduce a tree, as one vector, to the sum over all workers or their weighted mean, in codes.

        v_i = x_i + e_i        c_i = Q(v_i)        e_i <- v_i - c_i        sum_i w_i c_i / sum_i w_i

    where x_i is the mean, or sum, over the worker's examples, and e_i what it could not send before; e_i is 0 without
    error feedback, and at first (Seide et al. 2014, "1-bit stochastic gradient descent", equation 2). Sums of codes are
    coded again, without feedback.

    Args:
      weight: of each worker's value; `None` for a sum.
      when: the gate; e_i stays where nothing is sent.
    """
    own = local_sum(leaves) if weight is None else combine(LocalMean(), leaves, leaves, weight=weight)
    share = None if weight is None else local_sum({"": weight})[""]
    dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in leaves.values()) else jnp.float32
    vector = jnp.concatenate([x.astype(dtype).reshape(-1) for x in own.values()])
    # Codes have no infinities and NaNs; these numbers tell all workers of them, leaf by leaf.
    sound = {name: jnp.where(_finite(x).all(), 0, jnp.nan).astype(np.float32) for name, x in own.items()}
    vector, size = jnp.where(_finite(vector), vector, 0), vector.size
    codec = codec.fitted(size)

    def coded(x: jax.Array) -> tuple[Coded, jax.Array]:
        key = _key(0, ad.step(), ad.worker()) if rounding == "stochastic" else None
        found = codec.encode(codec.blocks(x), key)
        return found, codec.decode(found, dtype).reshape(-1)[:size]

    def update(left: jax.Array) -> tuple[jax.Array, Coded]:
        found, sent = coded(vector + left)
        new = vector + left - sent
        if when is not None:
            new = jnp.where(when, new, left)
        if share is not None:
            new = jnp.where(share > 0, new, left)
        return new, found

    if rounding == "error_feedback":
        found = operator_state(LABEL, np.zeros(size, dtype), update)
    else:
        found, _ = coded(vector)
    blocks = _summed(codec, rounding, codec.to_rows(found, share), leaves, when, dtype)
    counts = combine(Reduce("sum", checked=True), sound, sound, when=when)
    total = blocks.reshape(-1)[:size]
    if share is not None:
        total = total / combine(Reduce("sum", checked=True), {"": share}, {"": share}, when=when)[""].astype(dtype)
    ends = list(accumulate((leaf.size for leaf in leaves.values()), initial=0))
    results = [
        (total[start:stop].reshape(leaf.shape) + counts[name].astype(dtype)).astype(leaf.dtype)
        for (start, stop), (name, leaf) in zip(pairwise(ends), leaves.items(), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), results)


def _summed(
    codec: Codec,
    rounding: Rounding,
    rows: jax.Array,
    leaves: dict[str, jax.Array],
    when: jax.Array | None,
    dtype: Any,
) -> jax.Array:
    """Return the sum of all workers' blocks; shape=(blocks, block), of `dtype`."""
    first = next(iter(leaves))
    names = [first if len(leaves) == 1 else f"{first} and {len(leaves) - 1} more"]
    if codec.is_sparse:
        (gathered,) = collective(GatherCodes(), [rows], names=names, when=when)
        return reduce(jnp.add, (codec.decode(codec.of_rows(own), dtype) for own in gathered))
    slices = CodedSlices(codec, stochastic=rounding != "nearest")
    (total,) = collective(CodedSum(slices), [rows], names=names, when=when)
    return codec.decode(codec.of_rows(total), dtype)


def _finite(x: jax.Array) -> jax.Array:
    """Return where numbers are finite in single precision, in which scales travel."""
    return jnp.isfinite(x.astype(np.float32))


def _key(way: int, *numbers: Any) -> jax.Array:
    """Return a key for stochastic rounding, for one way and place in a step."""
    return reduce(jax.random.fold_in, numbers, jax.random.key(way))
