"""Reductions that are robust against a few bad workers: median, trimmed mean, geometric median.

The geometric median of a few vectors is computed from their inner products, which must not overflow although a bad
worker may send numbers of any magnitude. So vectors are first multiplied by one power of two, after which the median of
their magnitudes is about 1, and one that is much larger then by another one: far away, only its direction matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from adaptive.base.reductions import Sliced
from adaptive.base.values.numbers import whole
from adaptive.operators.collectives import Collective, collective

from ._leaves import combine, error, known_capacity, name_of_all
from ._local_mean import LocalMean, local_sum

_STEPS = 2000  # iterations of Weiszfeld's algorithm at most; each costs the cube of the number of workers
_EXACT = jax.lax.Precision.HIGHEST  # otherwise a GPU multiplies float32 with fewer bits


def geometric_weights(products: jax.Array, weights: jax.Array) -> jax.Array:
    """Find the point with the least weighted sum of distances to all vectors, by Weiszfeld's iteration.

    Args:
      products: inner products of all pairs of vectors, relative to a reference point; shape=(workers, workers).
      weights: a vector with weight 0 is ignored; shape=(workers,).

    Returns:
      The factors of the vectors in the linear combination that is this point; shape=(workers,).
    """
    n, dtype = len(weights), products.dtype
    lengths = jnp.sqrt(jnp.diagonal(products))
    unit, some = _median(lengths, weights), jnp.where(lengths > 0, lengths, 1)
    directions = products / some[:, None] / some[None]
    length = jnp.minimum(lengths / jnp.where(unit > 0, unit, 1), 2.0 ** _far(dtype))

    def distances(shares: jax.Array) -> jax.Array:
        """Return the vectors' distances from their mean with weights `shares`, without cancellation near a vector."""
        others = jnp.where(jnp.eye(n, dtype=bool), 0, shares).sum(1)
        away = jnp.where(jnp.eye(n, dtype=bool), others * length, -shares * length)
        return jnp.sqrt(jnp.maximum((jnp.matmul(away, directions, precision=_EXACT) * away).sum(1), 0))

    def pulled(shares: jax.Array) -> jax.Array:
        """Return the weights after one step of Weiszfeld's algorithm: inversely proportional to the distances."""
        pull = weights / jnp.maximum(distances(shares), jnp.finfo(dtype).eps)
        return pull / pull.sum()

    def moves(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        steps, before, shares = state
        moved = jnp.abs(shares - before) * jnp.maximum(length, 1)
        return (steps < _STEPS) & (moved.max() > 2 * jnp.finfo(dtype).eps)

    near = weights / (1 + length)
    start = jnp.zeros((), jnp.int32), jnp.full_like(near, jnp.inf), near / near.sum()
    shares = jax.lax.while_loop(moves, lambda state: (state[0] + 1, state[2], pulled(state[2])), start)[2]
    # If half of the weight is at the reference point, that point is the median.
    return jnp.where(unit > 0, shares * length * unit / some, 0)


def _far(dtype: Any) -> int:
    """Return the exponent of the length, in units of the median, beyond which only a vector's direction matters."""
    return jnp.finfo(dtype).maxexp // 4


def _median(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the weighted lower median; scalar."""
    order = jnp.argsort(values)
    return values[order][jnp.argmax(jnp.cumsum(weights[order]) >= weights.sum() / 2)]


T = TypeVar("T")

_SORTED_BY_SORT = 16  # workers from which jnp.sort takes fewer operations than a sorting network


class Robust(Sliced):
    """Reduction of one vector per worker. Its first element is the worker's weight; 0 excludes the worker."""

    name = "robust"

    def statistics(self, rows: jax.Array, first: Any) -> jax.Array:
        return jnp.where(first, rows[:, 0], 0)


class ByCoordinate(Robust):
    """Reduction of each element independently. Infinities count as extreme values; NaNs are excluded."""

    def reduced(self, rows: jax.Array, statistics: Any, step: Any, number: Any) -> jax.Array:
        return self.middle(rows, statistics)

    def middle(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        """Reduce over the workers. The result is NaN for elements with more NaNs than the reduction can ignore.

        Args:
          rows: shape=(workers, elements).
          weights: shape=(workers,).

        Returns:
          shape=(elements,)
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Median(ByCoordinate):
    """Weighted median of each element; the mean of the two middle values if the median is between them."""

    name = "median"

    def middle(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        values, shares = _sorted(*_votes(rows, weights))
        below, votes = jnp.cumsum(shares, 0), shares.sum(0, keepdims=True)
        lower = jnp.take_along_axis(values, jnp.argmax(below >= votes / 2, 0)[None], 0)[0]
        upper = jnp.take_along_axis(values, jnp.argmax(below > votes / 2, 0)[None], 0)[0]
        return jnp.where(2 * votes[0] > weights.sum(), lower / 2 + upper / 2, jnp.nan)


@dataclass(frozen=True)
class TrimmedMean(ByCoordinate):
    """Weighted mean of each element without the `trim` greatest and the `trim` least values."""

    trim: int

    name = "trimmed_mean"

    def middle(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        values, shares = _sorted(*_votes(rows, weights))
        voters, workers = (shares > 0).sum(0, keepdims=True), (weights > 0).sum()
        trim = jnp.minimum(self.trim, (voters - 1) // 2)  # with few workers left, at least the middle one counts
        place = jnp.arange(len(rows))[:, None]
        shares = jnp.where((place >= trim) & (place < voters - trim), shares, 0)
        parts = shares / shares.sum(0, keepdims=True)  # before the product, which may overflow
        mean = jnp.where(shares > 0, parts * values, 0).sum(0)
        return jnp.where(workers - voters[0] <= jnp.minimum(self.trim, (workers - 1) // 2), mean, jnp.nan)


@dataclass(frozen=True)
class GeometricMedian(Robust):
    """The point with the least weighted sum of distances to all workers' vectors.

    Distances are between whole vectors, but each worker has a slice of all vectors. The workers therefore sum two small
    matrices: the weights, then the inner products of all pairs of vectors. The point is a linear combination of the
    vectors, whose factors follow from these.
    """

    name = "geometric_median"

    def statistics(self, rows: jax.Array, first: Any) -> jax.Array:
        """Return each worker's weight, whether a value is not finite, and the values' magnitude; shape=(workers, 3).

        The magnitude is the largest one of the slice, divided by the number of workers, so that sums do not overflow.
        """
        bad = ~jnp.isfinite(rows).all(1)
        largest = jnp.abs(_without_weight(rows, first)).max(1, initial=0) / len(rows)
        return jnp.stack([super().statistics(rows, first), bad.astype(rows.dtype), jnp.where(bad, 0, largest)], 1)

    def further_statistics(self, rows: jax.Array, first: Any, statistics: jax.Array) -> jax.Array:
        """Return the inner products of all pairs of vectors, relative to the reference point."""
        _, _, away, _ = _relative(_without_weight(rows, first), statistics)
        return jnp.matmul(away, away.T, precision=_EXACT)

    def reduced(self, rows: jax.Array, statistics: Any, step: Any, number: Any) -> jax.Array:
        first, products = statistics
        weights, reference, away, exponent = _relative(rows, first)
        factors = geometric_weights(products, weights).astype(rows.dtype)[:, None]
        point = reference + jnp.where(factors != 0, factors * away, 0).sum(0)
        return jnp.where(2 * weights.sum() > first[:, 0].sum(), jnp.ldexp(point, exponent), jnp.nan)


def _without_weight(rows: jax.Array, first: Any) -> jax.Array:
    """Return the rows with zeros in place of the workers' weights, which are the first elements of the first slice."""
    return jnp.where(first & (jnp.arange(rows.shape[1]) == 0)[None], 0, rows)


def _relative(rows: jax.Array, statistics: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the weights of the finite vectors, their coordinate-wise median (the reference point), each vector's
    offset from it, and the exponent of the power of two by which the two were divided.
    """
    weights = jnp.where(statistics[:, 1] > 0, 0, statistics[:, 0])
    magnitudes, limits = statistics[:, 2], jnp.finfo(rows.dtype)
    exponents = jnp.where(magnitudes > 0, jnp.frexp(magnitudes)[1], limits.minexp)
    common = _median(exponents, weights)
    excess = jnp.maximum(exponents - common - _far(rows.dtype), 0)
    scaled = jnp.where(weights[:, None] > 0, jnp.ldexp(rows, -(common + excess)[:, None]), 0)
    reference = Median().middle(scaled, weights)
    return weights, reference, jnp.where(weights[:, None] > 0, scaled - reference[None], 0), common


def _votes(rows: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return values and their weights, both of the shape of `rows`; infinity and 0 for excluded values."""
    voting = (weights[:, None] > 0) & ~jnp.isnan(rows)
    return jnp.where(voting, rows, jnp.inf), jnp.where(voting, weights[:, None], 0).astype(rows.dtype)


def _sorted(values: jax.Array, shares: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sort each element's values over the workers in ascending order, and reorder their weights in the same way."""
    if len(values) >= _SORTED_BY_SORT:
        by_value = jax.lax.sort((values, shares), dimension=0, num_keys=1)
        return by_value[0], by_value[1]
    rows, own = list(values), list(shares)
    for turn in range(len(rows)):  # an odd-even sorting network: no gather, so XLA fuses it into one pass
        for i in range(turn % 2, len(rows) - 1, 2):
            swap = rows[i] > rows[i + 1]
            rows[i], rows[i + 1] = jnp.where(swap, rows[i + 1], rows[i]), jnp.where(swap, rows[i], rows[i + 1])
            own[i], own[i + 1] = jnp.where(swap, own[i + 1], own[i]), jnp.where(swap, own[i], own[i + 1])
    return jnp.stack(rows), jnp.stack(own)


def robust_of(op: Robust | str) -> Robust:
    """Return the robust reduction that `op=` names.

    Raises:
      CollectiveError: a trimmed mean would trim all workers.
    """
    if not isinstance(op, Robust):
        return Median()
    workers = known_capacity()
    if isinstance(op, TrimmedMean) and workers is not None and 1 < workers <= 2 * op.trim:
        most = (workers - 1) // 2
        instead = f"op=comm.trimmed_mean({most})" if most else "op='mean'"
        raise error(
            "all_reduce",
            f"op=comm.trimmed_mean({op.trim}) leaves out the values of {2 * op.trim} workers, but there are {workers}. "
            f"Use  {instead}",
        )
    return op


def robustly(how: Robust, tree: T, leaves: dict[str, jax.Array], weight: jax.Array, when: jax.Array | None) -> T:
    """Reduce a tree, as one vector, over the workers' means over their own examples.

    Raises:
      CollectiveError: it is called outside a program without a weight.
    """
    if not isinstance(weight, jax.core.Tracer) and jnp.isnan(weight):
        raise error(
            "all_reduce",
            f"op={how.name!r} outside a program, where the workers' numbers of examples are unknown. Pass this "
            "worker's weight:\n    comm.all_reduce(x, op=…, weight=1)",
        )
    own = combine(LocalMean(), leaves, leaves, weight=weight)
    dtype = jnp.float64 if any(leaf.dtype == jnp.float64 for leaf in leaves.values()) else jnp.float32
    flat = [x.astype(dtype).reshape(-1) for x in (local_sum({"": weight})[""], *own.values())]
    (vector,) = collective(RobustReduce(how), [jnp.concatenate(flat)], names=[name_of_all(leaves)], when=when)
    ends = list(accumulate((leaf.size for leaf in leaves.values()), initial=1))
    pieces = [vector[start:stop] for start, stop in pairwise(ends)]
    new = [x.reshape(leaf.shape).astype(leaf.dtype) for x, leaf in zip(pieces, leaves.values(), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), new)


def trimmed_mean(trim: int) -> TrimmedMean:
    """Return a reduction for `all_reduce(op=…)`: each element's mean without its greatest and least values.

    Args:
      trim: how many of the greatest, and of the least, values to leave out of each element's mean.

    Raises:
      CollectiveError: `trim` is not a positive integer.

    Example:
      >>> import jax.numpy as jnp, collectives as comm
      >>> print(comm.all_reduce(jnp.ones(2), op=comm.trimmed_mean(1)))  # outside a program: one worker
      [1. 1.]
    """
    number = whole(trim)
    if number is None or number < 1:
        raise error(
            "trimmed_mean",
            f"trim={trim!r} must be a positive integer: the number of workers to leave out at either end.",
        )
    return TrimmedMean(number)


def geometric_median() -> GeometricMedian:
    """Return a reduction for `all_reduce(op=…)`: the point with the least sum of distances to all workers' vectors.

    The result is bounded as long as the bad workers' weight is less than half, however large their values are. A worker
    with a value that is not finite is excluded. The whole tree is one vector.

    Example:
      >>> import jax.numpy as jnp, collectives as comm
      >>> print(comm.all_reduce(jnp.ones(2), op=comm.geometric_median()))  # outside a program: one worker
      [1. 1.]
    """
    return GeometricMedian()


@dataclass(frozen=True)
class RobustReduce(Collective):
    """Collective that applies a robust reduction to the workers' vectors. A vector's first element is its weight."""

    how: Robust

    name = "all_reduce"
    must_be_finite = True
    is_linear = False

    @property
    def op(self) -> Robust:
        return self.how

    @property
    def label(self) -> str:
        return self.how.name

    @property
    def about(self) -> str:
        return f"all_reduce(op={self.how})"
