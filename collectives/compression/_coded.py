"""Compressed `all_reduce`: means and sums that are sent in a few bits per number, with error feedback."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
from adaptive.base.reductions import Sliced
from adaptive.operators.collectives import Collective, collective
from adaptive.operators.operator_state import operator_state
from collectives._islands import Islands, island_sum
from collectives._leaves import combine, name_of_all
from collectives._local_mean import LocalMean, local_sum
from collectives._reduce import Reduce

from ._wire import Codec, Coded, Rounding, key_of

LABEL = "left by rounding"  # of the operator state


@dataclass(frozen=True)
class CodedSlices(Sliced):
    """Sum of encoded blocks: each worker sums its slice of all workers' blocks in float32, and encodes the sum."""

    codec: Codec
    stochastic: bool = False

    skips_zeros = True

    @property
    def granule(self) -> int:
        return self.codec.row_bytes

    def reduced(self, rows: jax.Array, statistics: Any, step: Any, number: Any) -> jax.Array:
        if len(rows) == 1 or not rows.size:
            return rows[0]
        blocks = rows.reshape(len(rows), -1, self.codec.row_bytes)
        total = reduce(jnp.add, (self.codec.decode(self.codec.of_rows(own)) for own in blocks))
        key = key_of(1, step, number) if self.stochastic else None
        return self.codec.to_rows(self.codec.encode(total, key)).reshape(-1)


@dataclass(frozen=True)
class CodedSum(Collective):
    """Collective that sums encoded blocks by slices. Operand and result: shape=(blocks, row_bytes), uint8."""

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


def in_codes(
    codec: Codec,
    rounding: Rounding,
    tree: Any,
    leaves: dict[str, jax.Array],
    weight: jax.Array | None,
    when: jax.Array | None,
    hosts: Islands | None = None,
) -> Any:
    """Reduce a tree, as one vector, to the compressed sum or weighted mean over all workers.

        v_i = x_i + e_i        c_i = Q(v_i)        e_i <- v_i - c_i        sum_i w_i c_i / sum_i w_i

    where x_i is the mean, or sum, over the worker's examples, Q encodes, and e_i is the error of the last encoding: 0
    at first, and without error feedback (Seide et al. 2014, "1-bit stochastic gradient descent", equation 2). The sum
    is encoded again, without feedback.

    Args:
      weight: scalar, this worker's weight; `None` for a sum. Local.
      when: see `all_reduce`; e_i does not change in steps without sending. Replicated.
      hosts: the workers of each host. If given, i is a host, and the first of its workers that has examples sends.
    """
    own = local_sum(leaves) if weight is None else combine(LocalMean(), leaves, leaves, weight=weight)
    share = None if weight is None else local_sum({"": weight})[""]
    dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in leaves.values()) else jnp.float32
    vector = jnp.concatenate([x.astype(dtype).reshape(-1) for x in own.values()])
    # Codes cannot represent infinities and NaNs, so they are reported to all workers by one number per leaf.
    finite = _finite(vector)
    vector, sends = jnp.where(finite, vector, 0), None if share is None else share > 0
    if hosts is not None:
        vector, share, sends = _of_host(hosts, vector, share, when)
        finite, vector = finite & _finite(vector), jnp.where(_finite(vector), vector, 0)
    places = list(pairwise(accumulate((leaf.size for leaf in leaves.values()), initial=0)))
    sound = {
        name: jnp.where(finite[start:stop].all(), 0, jnp.nan).astype(np.float32)
        for (start, stop), name in zip(places, leaves, strict=True)
    }
    size = vector.size
    codec = codec.fitted(size)

    def coded(x: jax.Array) -> tuple[Coded, jax.Array]:
        key = key_of(0, ad.step_number(), ad.worker_index()) if rounding == "stochastic" else None
        found = codec.encode(codec.blocks(x), key)
        return found, codec.decode(found, dtype).reshape(-1)[:size]

    def update(left: jax.Array) -> tuple[jax.Array, Coded]:
        found, sent = coded(vector + left)
        new = vector + left - sent
        if when is not None:
            new = jnp.where(when, new, left)
        if sends is not None:
            new = jnp.where(sends, new, left)
        return new, found

    if rounding == "error_feedback":
        found = operator_state(LABEL, np.zeros(size, dtype), update)
    else:
        found, _ = coded(vector)
    rows = codec.to_rows(found, share)
    if sends is not None:
        rows = jnp.where(sends, rows, 0)  # which need not be sent
    slices = CodedSlices(codec, stochastic=rounding != "nearest")
    (summed,) = collective(CodedSum(slices), [rows], names=[name_of_all(leaves)], when=when)
    counts = combine(Reduce("sum", checked=True), sound, sound, when=when)
    total = codec.decode(codec.of_rows(summed), dtype).reshape(-1)[:size]
    if share is not None:
        total = total / combine(Reduce("sum", checked=True), {"": share}, {"": share}, when=when)[""].astype(dtype)
    results = [
        (total[start:stop].reshape(leaf.shape) + counts[name].astype(dtype)).astype(leaf.dtype)
        for (start, stop), (name, leaf) in zip(places, leaves.items(), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), results)


def _of_host(
    hosts: Islands, vector: jax.Array, share: jax.Array | None, when: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Combine the vectors of a host's workers, exactly, for the one that sends.

    Args:
      vector: this worker's mean or sum; shape=(size,).
      share: this worker's weight; `None` for a sum.
      when: see `all_reduce`.

    Returns:
      The host's mean or sum, its weight (zero on the workers that do not send; `None` for a sum), and whether this
      worker sends. On workers that do not send, the vector is zero. Local.
    """
    weight = jnp.ones((), vector.dtype) if share is None else share.astype(vector.dtype)
    numbers = jnp.arange(sum(map(len, hosts)), dtype=np.int32)
    takes_part = (numbers == ad.worker_index()) & (weight > 0)
    total, weight, takes_part = island_sum((vector * weight, weight, takes_part.astype(np.float32)), hosts, when=when)
    sends = (takes_part.sum() > 0) & (jnp.argmax(takes_part > 0).astype(np.int32) == ad.worker_index())
    total = jnp.where(sends, total, 0)
    if share is None:
        return total, None, sends
    return total / jnp.where(weight > 0, weight, 1), jnp.where(sends, weight, 0).astype(share.dtype), sends


def _finite(x: jax.Array) -> jax.Array:
    """Return which numbers are finite in single precision, the format of the scales."""
    return jnp.isfinite(x.astype(np.float32))
