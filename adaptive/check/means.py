"""Checks whether a function's result for a batch is a mean or a sum over its examples, or has a row for each of them.

`evaluate` combines batches by weighted means or sums, or joins their rows. An exponential of a mean loss, a mean over
tokens, or rows normalized over the batch would depend on the batch size. So the function is computed for a few examples
as one batch and as two, in double precision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from adaptive.base.errors import DriverError
from adaptive.base.process.cores import n_cores
from adaptive.base.values.jaxprs import ClosedJaxpr, asks_the_host, has_effects, nested_equations
from adaptive.runtime.kernels.compile import side_by_side

from .rounding import in_double
from .widen import CannotWidenError, inlined, wide

_FEW = 8  # examples to compare; with few examples, a function that is not a mean differs most from one
_LOOKS = 3  # most attempts per function; repeated while both parts give the same, as before training
_SEED = 0  # of the rows that are compared; the same on all processes
_RELATIVE = 1e-5  # tolerance relative to the largest value; single precision is enough
_ABSOLUTE = 1e-10  # tolerance for a sum of terms near 1 that cancel
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator")

Op = Literal["mean", "sum", "rows"]


class MeanCheck:
    """Check that compares a function on a few examples with its parts; each function is checked once for each `op`."""

    def __init__(self) -> None:
        self._looks: Counter[int] = Counter()

    def __call__(
        self,
        fn: Callable[[Any, Any], Any],
        state: Any,
        rows: Callable[[np.ndarray], Any],
        sizes: tuple[int, int],
        names: Sequence[str | None],
        op: Op,
    ) -> None:
        """Raise a DriverError unless the leaves of `fn(state, batch)` are means, sums or rows, as `op` says.

        Does nothing for functions with effects, with random numbers drawn for a whole batch, for batches of one size
        only, and for what cannot be computed in double precision or is not finite.

        Args:
          rows: returns the examples with the given indices, as a batch.
          sizes: (number of examples, examples in a batch).
          names: of the leaves; `None` for one that is merged in another way.
        """
        few = min(_FEW, *sizes)
        first = max(1, 3 * few // 8)  # unequal parts: a mean with other weights may match equal ones by chance
        if few < 2:
            return
        try:
            whole = rows(_spread(few, sizes[0]))
            batches = [whole, jax.tree.map(lambda a: a[:first], whole), jax.tree.map(lambda a: a[first:], whole)]
            traced = [jax.make_jaxpr(fn)(state, batch) for batch in batches]
        except Exception:  # the function's own: it may be written for batches of one size
            return
        known = hash((op, tuple(names), str(traced[0].jaxpr)))
        if self._looks[known] >= _LOOKS or not _can_be_repeated(traced):
            return
        try:
            with jax.enable_x64(True):
                found = _computed(traced, state, batches)
        except (CannotWidenError, jax.errors.JaxRuntimeError):
            return
        conclusive = True  # whether the parts differ; if not, every function looks like a mean
        for name, *values in zip(names, *found, strict=True):
            if name is not None:
                conclusive = _compare(name, values, (first, few - first), op) and conclusive
        self._looks[known] += _LOOKS if conclusive else 1


def _spread(count: int, examples: int) -> np.ndarray:
    """Return the indices of `count` different examples in ascending order: the first, the last, and random ones between
    them. In sorted data, neighbors are alike: with equal lengths or masks, a mean over tokens is one over examples.
    """
    between = 1 + np.random.default_rng(_SEED).choice(examples - 2, count - 2, replace=False)
    return np.sort(np.array([0, *between, examples - 1]))


def _can_be_repeated(traced: Sequence[ClosedJaxpr]) -> bool:
    """Return whether the function has no effects, and draws no random numbers for a whole batch."""
    of_batches = [[e for outer in closed.jaxpr.eqns for e in (outer, *nested_equations(outer))] for closed in traced]
    whole, *parts = (
        [v.aval.shape for e in eqns if e.primitive.name in _RANDOM for v in e.outvars] for eqns in of_batches
    )
    return parts == [whole, whole] and not any(has_effects(e) or asks_the_host(e) for e in of_batches[0])


def _computed(traced: Sequence[ClosedJaxpr], state: Any, batches: Sequence[Any]) -> list[list[np.ndarray]]:
    """Return the leaves of the function's result for each batch, in double precision."""
    programs, given = [], []
    for closed, batch in zip(traced, batches, strict=True):
        leaves = zip(jax.tree.leaves((state, batch)), closed.in_avals, strict=True)
        # In the dtype that the function has been traced for; random keys have it.
        given.append([wide(x if getattr(x, "dtype", 0) == a.dtype else np.asarray(x, a.dtype)) for x, a in leaves])
        programs.append(jax.jit(lambda *operands, closed=closed: inlined(closed, operands)))
    side_by_side([p.lower(*g).compile for p, g in zip(programs, given, strict=True)], most=n_cores())
    return [[in_double(np.asarray(v)) for v in p(*g)] for p, g in zip(programs, given, strict=True)]


def _compare(name: str, values: Sequence[np.ndarray], parts: tuple[int, int], op: Op) -> bool:
    """Raise if the parts of a leaf do not combine to the whole. Return whether the parts (or the rows) differ."""
    whole, first, second = values
    rows = op == "rows"
    with np.errstate(all="ignore"):
        if rows:
            both = np.concatenate([first, second])
        else:
            both = first + second if op == "sum" else (parts[0] * first + parts[1] * second) / sum(parts)
        largest = np.abs([whole, both]).max((0, 1)) if rows else np.abs(values).max(0)
        allowed = _RELATIVE * largest + _ABSOLUTE
        gaps = np.abs(whole - both)
        off = np.isfinite(gaps) & (gaps > allowed)
        if not off.any():
            return bool((np.abs(whole - whole[:1] if rows else first - second) > allowed).any())
    at = np.unravel_index(int(np.argmax(off)), off.shape)
    if rows:
        size = parts[int(at[0] >= parts[0])]
        raise DriverError(
            f"evaluate: a row of {name} depends on other examples: one example gives {whole[at]:.6g} in a batch of "
            f"{sum(parts)} examples and {both[at]:.6g} in a batch of {size}. So the result would depend on batch=. "
            "Compute each row from its own example; batch normalization from its running averages. For a value of the "
            'whole batch: op="mean" or op="sum".'
        )
    texts = [f"{v[at]:.6g}" for v in (whole, first, second, both)]
    raise DriverError(
        f"evaluate: {name} is no {op} over the batch's examples: {sum(parts)} examples give {texts[0]}; the first "
        f"{parts[0]} of them give {texts[1]} and the other {parts[1]} give {texts[2]}, of which the {op} is "
        f"{texts[3]}. So the result would depend on batch=. What to write instead:\n"
        "    a function of a mean   evaluate the mean, and apply the function to the result:  np.exp(loss)\n"
        '    a mean over tokens, or over what a mask leaves   evaluate both sums with op="sum", and divide\n'
        "    an extreme, a rank, the area under a curve   a metric with merge(): see docs/recipes.md\n"
        "    batch normalization    its running averages"
    )
