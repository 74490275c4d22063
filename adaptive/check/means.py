"""Checks whether a function's result for a batch is a mean or a sum over its examples.

`evaluate` combines batches by weighted means or sums. For an exponential of a mean loss, a maximum, or a mean over
tokens, the result would depend on the batch size. So the function is computed for a few examples of the whole data set
as one batch and as two batches, in double precision if possible, and the results are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from adaptive.base.errors import DriverError
from adaptive.base.jaxprs import asks_the_host, has_effects, nested_equations

from .widen import CannotWidenError, inlined, is_narrow, wide

_FEW = 8  # examples to compare; with few examples, a function that is not a mean differs most from one
_LOOKS = 3  # most attempts per function; repeated while both parts give the same, as before training
_SEED = 0  # of the rows that are compared; the same on all processes
_RELATIVE = 1e-5  # tolerance relative to the largest value; single precision is enough
_ABSOLUTE = 1e-10  # tolerance for a sum of terms near 1 that cancel
_ROUNDING = 1000  # tolerance in units in the last place, if double precision is not possible
_MULTIPLE = 16  # tolerance, as a multiple of the effect of another order of the examples
_MOST_ROUNDING = 1e-6  # larger effects of the order are not rounding errors
_RANDOM = ("random_bits", "threefry2x32", "rng_bit_generator")

Op = Literal["mean", "sum"]


class MeanCheck:
    """Check that compares a function on a few examples with its parts; each function is checked once."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}

    def __call__(
        self,
        fn: Callable[[Any, Any], Any],
        state: Any,
        rows: Callable[[np.ndarray], Any],
        sizes: tuple[int, int],
        names: Sequence[str | None],
        op: Op,
    ) -> None:
        """Raise unless the leaves that `fn(state, batch)` returns are means over the batch's examples, or sums.

        Returns without a check if there is nothing to compare: functions with effects, with random numbers drawn for a
        whole batch, for batches of one size only, and values that are not finite.

        Args:
          rows: returns the examples with the given indices, as a batch.
          sizes: (number of examples, examples in a batch).
          names: of the leaves; `None` for one that is merged in another way.
          op: "mean" or "sum".

        Raises:
          DriverError: a leaf is not a mean, or not a sum.
        """
        most = min(sizes)
        few = min(_FEW, most)
        # Unequal parts first: with equal parts, a mean with other weights than examples can match by chance.
        for parts in [(max(1, 3 * few // 8), few - max(1, 3 * few // 8)), (most // 2, most // 2)]:
            if not all(parts):
                continue
            try:
                batch = rows(_spread(sum(parts), sizes[0]))
                traced = [jax.make_jaxpr(fn)(state, _of_size(batch, n)) for n in (sum(parts), *parts)]
            except Exception:  # the function's own: it may be written for batches of one size
                continue
            self._look(_Trial(traced, state, batch, parts), names, op)
            return

    def _look(self, trial: _Trial, names: Sequence[str | None], op: Op) -> None:
        known = hash(str(trial.traced[0].jaxpr))
        if self._looks.get(known, 0) >= _LOOKS or not trial.can_be_repeated:
            return
        conclusive = True
        for name, one in zip(names, trial.leaves(), strict=True):
            if name is not None:
                _refuse(name, one, op)
                conclusive = conclusive and one.conclusive
        self._looks[known] = _LOOKS if conclusive else self._looks.get(known, 0) + 1


def _spread(count: int, examples: int) -> np.ndarray:
    """Return the indices of `count` different examples in ascending order: the first, the last, and random ones between
    them. In sorted data, neighbors are alike: with equal lengths or masks, a mean over tokens is one over examples.
    """
    between = 1 + np.random.default_rng(_SEED).choice(examples - 2, count - 2, replace=False)
    return np.sort(np.array([0, *between, examples - 1]))


class _Leaf:
    """Results for one leaf: for all examples, in two orders, and for both parts of them."""

    def __init__(self, values: Sequence[np.ndarray], parts: tuple[int, int], relative: float):
        kind = np.complex128 if np.iscomplexobj(values[0]) else np.float64
        self.whole, self.turned, self.first, self.second = (np.asarray(v).astype(kind) for v in values)
        self.parts, self._relative = parts, relative

    def combined(self, op: Op) -> np.ndarray:
        if op == "sum":
            return self.first + self.second
        return (self.parts[0] * self.first + self.parts[1] * self.second) / sum(self.parts)

    def off(self, op: Op) -> np.ndarray:
        """Return the elements where the parts do not combine to the whole."""
        with np.errstate(all="ignore"):
            gaps = np.abs(self.whole - self.combined(op))
            order = np.abs(self.whole - self.turned)
            noise = _MULTIPLE * float(order.max(initial=0.0, where=order < _MOST_ROUNDING))
            return np.isfinite(gaps) & (gaps > self._relative * self._scale() + noise + _ABSOLUTE)

    @property
    def conclusive(self) -> bool:
        """Whether the parts differ; if not, every function looks like a mean."""
        with np.errstate(all="ignore"):
            return bool((np.abs(self.first - self.second) > self._relative * self._scale()).any())

    def _scale(self) -> np.ndarray:
        return np.max(np.abs([self.whole, self.first, self.second]), axis=0)


class _Trial:
    """A function, traced for all examples and for both parts of them, and the examples."""

    def __init__(self, traced: Sequence[ClosedJaxpr], state: Any, batch: Any, parts: tuple[int, int]):
        self.traced, self._state, self._batch, self._parts = traced, state, batch, parts

    @property
    def can_be_repeated(self) -> bool:
        """Whether the function has no effects, and draws no random numbers for a whole batch."""
        whole, first, second = ([*_equations(closed)] for closed in self.traced)
        pure = not any(has_effects(e) or asks_the_host(e) for e in whole)
        return pure and _drawn(whole) == _drawn(first) == _drawn(second)

    def leaves(self) -> Iterator[_Leaf]:
        first = self._parts[0]
        turned = jax.tree.map(lambda a: np.asarray(a)[::-1], self._batch)
        given = [
            [self._batch, turned],
            [_of_size(self._batch, first)],
            [jax.tree.map(lambda a: a[first:], self._batch)],
        ]
        try:
            with jax.enable_x64(True):
                relative, found = (
                    _RELATIVE,
                    self._computed(given, lambda closed: lambda *operands: inlined(closed, operands), wide),
                )
        except (CannotWidenError, jax.errors.JaxRuntimeError):
            relative, found = self._own_precision(), self._computed(given, jaxpr_as_fun, lambda leaf: leaf)
        for values in zip(*found, strict=True):
            yield _Leaf(values, self._parts, relative)

    def _own_precision(self) -> float:
        """Return the tolerance for the function's own precision."""
        dtypes = {v.aval.dtype for e in _equations(self.traced[0]) for v in e.outvars if hasattr(v.aval, "dtype")}
        return max([_RELATIVE, *(_ROUNDING * float(jnp.finfo(d).eps) for d in dtypes if is_narrow(d))])

    def _computed(
        self, given: Sequence[Sequence[Any]], function_of: Callable[[ClosedJaxpr], Any], leaf_as: Callable[[Any], Any]
    ) -> list[list[np.ndarray]]:
        """Return the function's results for batches of each size, as lists of leaves."""
        found = []
        for closed, batches in zip(self.traced, given, strict=True):
            function = jax.jit(function_of(closed))
            for batch in batches:
                leaves = zip(jax.tree.leaves((self._state, batch)), closed.in_avals, strict=True)
                results = function(*(leaf_as(_as(leaf, aval)) for leaf, aval in leaves))
                found.append([np.asarray(v) for v in results])
        return found


def _as(leaf: Any, aval: Any) -> Any:
    """Cast a leaf to the dtype that a function has been traced for."""
    return leaf if hasattr(leaf, "dtype") and leaf.dtype == aval.dtype else np.asarray(leaf).astype(aval.dtype)


def _of_size(batch: Any, count: int) -> Any:
    return jax.tree.map(lambda a: a[:count], batch)


def _equations(closed: ClosedJaxpr) -> Iterator[JaxprEqn]:
    for eqn in closed.jaxpr.eqns:
        yield eqn
        yield from nested_equations(eqn)


def _drawn(eqns: Sequence[JaxprEqn]) -> list[tuple[int, ...]]:
    return [v.aval.shape for e in eqns if e.primitive.name in _RANDOM for v in e.outvars]


def _refuse(name: str, leaf: _Leaf, op: Op) -> None:
    off = leaf.off(op)
    if not off.any():
        return
    at = np.unravel_index(int(np.argmax(off)), off.shape)
    whole, one, other, both = (f"{v[at]:.6g}" for v in (leaf.whole, leaf.first, leaf.second, leaf.combined(op)))
    first, second = leaf.parts
    raise DriverError(
        f"evaluate: {name} is no {op} over the batch's examples: {first + second} examples give {whole}; the first "
        f"{first} of them give {one} and the other {second} give {other}, of which the {op} is {both}. So the result "
        "would depend on batch=. What to write instead:\n"
        "    a function of a mean   evaluate the mean, and apply the function to the result:  np.exp(loss)\n"
        '    a mean over tokens, or over what a mask leaves   evaluate both sums with op="sum", and divide\n'
        "    an extreme, a rank, the area under a curve   a metric with merge(): see docs/metrics.md\n"
        "    batch normalization    its running averages"
    )
