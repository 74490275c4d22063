"""Two-byte number formats of `all_reduce`, and error feedback for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from adaptive.base.reductions import Sliced
from adaptive.operators.operator_state import operator_state
from adaptive.operators.sources import GLOBAL_BATCH, read

from ._leaves import combine, error
from ._local_mean import local_sum
from ._reduce import Reduce

Rounding = Literal["nearest", "stochastic", "error_feedback"]
Wire = DTypeLike  # "8bit", "4bit" and "2bit" are strings, as names of dtypes are
_FORMATS = ("bfloat16", "float16")
FORMATS_IN_WORDS = 'Use jnp.bfloat16, jnp.float16, "8bit", "4bit" or "2bit".'
_LOW_BITS = 16  # bits of a single-precision number that bfloat16 drops


@dataclass(frozen=True)
class Narrow(Sliced):
    """Sum of values that are sent in a two-byte format and added in single precision."""

    format: str
    stochastic: bool = False

    adds_up = True
    elementwise = True
    is_sum = True

    def wire_dtype(self, dtype: np.dtype) -> np.dtype:
        return jnp.dtype(self.format)

    def weight_of(self, examples: jax.Array) -> jax.Array:
        """Return a mean's weight for `examples`, for float16 relative to the global batch, to avoid overflow."""
        if self.format != "float16":
            return examples
        return examples / read(GLOBAL_BATCH).astype(examples.dtype)

    def sent(self, x: jax.Array, step: Any, worker: Any) -> jax.Array:
        return self._rounded(x.astype(jnp.float32), step, worker, 0)

    def reduced(self, rows: jax.Array, statistics: Any, step: Any, number: Any) -> jax.Array:
        return self._rounded(rows.astype(jnp.float32).sum(0), step, number, 1)

    def _rounded(self, x: jax.Array, step: Any, place: Any, way: int) -> jax.Array:
        if not self.stochastic:
            return x.astype(self.format)
        key = jax.random.key(way)
        for number in (step, place):
            key = jax.random.fold_in(key, number)
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        moved = bits + jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
        rounded = jax.lax.bitcast_convert_type(moved >> _LOW_BITS << _LOW_BITS, jnp.float32)
        return jnp.where(jnp.isfinite(x), rounded, x).astype(self.format)  # where not finite: unrounded


def narrow(wire: DTypeLike, rounding: Rounding, dtypes: Sequence[Any], op: Any) -> Narrow:
    """Return the reduction for `wire=` and `rounding=` of an `all_reduce`.

    Raises:
      CollectiveError: the format or the rounding is not supported, or not with each other, `op` or a dtype.
    """
    try:
        name = jnp.dtype(wire).name
    except TypeError:
        name = repr(wire)
    if name not in _FORMATS:
        raise error("all_reduce", f"wire={name} is not a supported format. {FORMATS_IN_WORDS}")
    if rounding not in get_args(Rounding):
        raise error("all_reduce", f"rounding= must be 'nearest', 'stochastic' or 'error_feedback'; got {rounding!r}.")
    if rounding != "nearest" and name != "bfloat16":
        raise error("all_reduce", f"rounding={rounding!r} needs wire=jnp.bfloat16, not {name}.")
    if op not in ("mean", "sum"):
        raise error("all_reduce", f"wire= is for means and sums; op={op!r} supports no other format.")
    for dtype in dtypes:
        if not jnp.issubdtype(dtype, jnp.floating):
            text = f"wire={name} of {dtype}: only real floats are supported. Reduce such leaves in another call."
            raise error("all_reduce", text)
    return Narrow(name, rounding != "nearest")  # with error feedback the sum is rounded stochastically


def with_feedback(
    how: Narrow, tree: Any, leaves: dict[str, jax.Array], weight: jax.Array | None, when: jax.Array | None
) -> Any:
    """Reduce a tree by a sum or mean with error feedback.

    A worker sends `q = round(s + r)`, where s is the sum over its examples and r its rounding error of the last step,
    and keeps `r = s + r - q` for the next step (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").
    """
    # Cast before weighting, which would round in half precision.
    single = {name: x.astype(jnp.float32) for name, x in leaves.items()}
    weighed = single if weight is None else {name: x * weight.astype(jnp.float32) for name, x in single.items()}
    sums = local_sum(weighed)

    def update(left: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        wanted = {name: x + left[name] for name, x in sums.items()}
        sent = {name: x.astype(how.format).astype(jnp.float32) for name, x in wanted.items()}
        new = {name: x - sent[name] for name, x in wanted.items()}
        if when is not None:
            new = {name: jnp.where(when, x, left[name]) for name, x in new.items()}
        return new, sent

    nothing_left = {name: np.zeros(x.shape, np.float32) for name, x in leaves.items()}
    sent = operator_state("left by rounding", nothing_left, update)
    total = combine(Reduce("sum", how, checked=True), sent, sent, when=when)
    if weight is not None:
        own = local_sum({"weights": weight})
        count = combine(Reduce("sum", checked=True), own, own, when=when)["weights"]
        total = {name: x / count.astype(x.dtype) for name, x in total.items()}
    results = [total[name].astype(leaf.dtype) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), results)
