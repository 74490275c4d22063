"""The collective that `all_reduce` uses, and the checks of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from adaptive.base.reductions import Reduction, Sliced
from adaptive.operators.collectives import Collective

from ._leaves import error

Op = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Reduce(Collective):
    """Collective that reduces the values of all workers to one.

    Args:
      operation: the reduction's name.
      wire: the number format in which a sum is sent; `None` for the values' own.
      checked: whether the result must be finite even if no contribution was checked.
    """

    operation: Op = "mean"
    wire: Sliced | None = None
    checked: bool = False

    name = "all_reduce"
    reduces = True

    @property
    def op(self) -> Reduction:
        named = "sum" if self.operation == "mean" else self.operation
        return named if self.wire is None else self.wire

    @property
    def weighted(self) -> bool:
        return self.operation == "mean"

    @property
    def must_be_finite(self) -> bool:  # type: ignore[override]
        return self.checked

    @property
    def is_linear(self) -> bool:  # type: ignore[override]
        return self.op == "sum"

    def of_replicated(self, x: jax.Array, taking_part: jax.Array) -> jax.Array:
        return x * taking_part.sum().astype(x.dtype) if self.operation == "sum" else x

    @property
    def label(self) -> str:
        return self.operation if self.wire is None else f"{self.operation}, narrow"

    @property
    def about(self) -> str:
        return f"all_reduce(op={self.operation!r}{'' if self.wire is None else f', wire={self.wire}'})"


def gate(what: str, when: ArrayLike | None) -> jax.Array | None:
    """Return `when` as a boolean scalar for the collective's primitive; None means always.

    Raises:
      CollectiveError: `when` is not one boolean.
    """
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
            "    when=ad.step_number() % 8 == 0",
        )
    return value


def problem_of(dtype: Any, op: Any = "mean") -> str | None:
    """Return why values of `dtype` cannot be reduced by `op` and what to write instead, or None if they can."""
    if dtype == jnp.bool_:
        return (
            f"boolean, which has no {op}. Convert it:\n"
            "    comm.all_reduce(x.astype(jnp.int32), op='sum')     on how many workers it is true\n"
            "    comm.all_reduce(x.astype(jnp.int32), op='max')     whether it is true on any"
        )
    if op == "mean" and jnp.issubdtype(dtype, jnp.integer):
        return (
            f"{dtype}, whose mean would be rounded. Write one of\n"
            "    comm.all_reduce(x, op='sum')\n"
            "    comm.all_reduce(x.astype(jnp.float32))"
        )
    if op not in get_args(Op) and not jnp.issubdtype(dtype, jnp.floating):
        return f"{dtype}, which has no {getattr(op, 'name', op)}. Reduce floats."
    if op in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        return f"{dtype}, which has no {op}. Reduce real numbers:\n    comm.all_reduce(jnp.abs(z), op={op!r})"
    return None


def checked_weight(weight: ArrayLike) -> jax.Array:
    """Return a weight as a floating-point scalar of at least single precision.

    Raises:
      CollectiveError: the weight is not one finite, nonnegative real number.
    """
    try:
        w = jnp.asarray(weight)
    except TypeError:
        raise error("all_reduce", f"weight={weight!r} is not a number.") from None
    real = jnp.issubdtype(w.dtype, jnp.floating) or jnp.issubdtype(w.dtype, jnp.integer)
    if w.shape != () or not real:
        raise error(
            "all_reduce",
            f"weight= must be one real number per worker, but is {w.dtype}{list(w.shape)}. Sum it over the batch:\n"
            "    comm.all_reduce(x, weight=mask.astype(jnp.float32).sum())",
        )
    if not isinstance(w, jax.core.Tracer) and not 0 <= float(w) < float("inf"):
        raise error("all_reduce", f"weight={w} must be finite and not negative.")
    return w if jnp.issubdtype(w.dtype, jnp.floating) and w.dtype.itemsize >= 4 else w.astype(jnp.float32)
