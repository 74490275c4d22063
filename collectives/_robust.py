"""Reductions that a few bad workers cannot spoil: median, trimmed mean, geometric median."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from adaptive.extend import Collective, Sliced, collective, whole

from ._leaves import combine, error, known_workers
from ._local_mean import LocalMean, local_sum

T = TypeVar("T")

_STEPS = 4000  # of Weiszfeld's, at most; each costs the square of the number of workers
_SORTED_BY_SORT = 16  # workers: from here on a sort is fewer operations than comparing neighbours over and over


class Robust(Sliced):
    """Reduces workers' flat values, the first element of which is each worker's weight: 0 has no vote.

    What is not finite counts as far out; so a worker that sends nothing else is one bad worker.
    """

    name = "robust"

    def statistics(self, rows: jax.Array, first: Any) -> jax.Array:
        return jnp.where(first, rows[:, 0], 0)

    def reduced(self, rows: jax.Array, statistics: Any, step: Any, number: Any) -> jax.Array:
        return self.middle(jnp.where(jnp.isnan(rows), jnp.inf, rows), statistics)

    def middle(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        """Of each element, by all workers' values of it. shape=(elements,)"""
        raise NotImplementedError


@dataclass(frozen=True)
class Median(Robust):
    """Of each element, the value that half of the weight is below; where that is between two, their mean."""

    name = "median"

    def middle(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        values, shares = _sorted(jnp.where(weights[:, None] > 0, rows, jnp.inf), weights)
        below, half = jnp.cumsum(shares, 0), weights.sum() / 2
        lower = jnp.take_along_axis(values, jnp.argmax(below >= half, 0)[None], 0)[0]
        upper = jnp.take_along_axis(values, jnp.argmax(below > half, 0)[None], 0)[0]
        return lower / 2 + upper / 2


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """Of each element, the weighted mean without the `trim` greatest and the `trim` least values."""

    trim: int

    name = "trimmed_mean"

    def middle(self, rows: jax.Array, weights: jax.Array) -> jax.Array:
        there = (weights > 0).sum()
        trim = jnp.minimum(self.trim, (there - 1) // 2)  # of fewer workers than there were: the middle one is left
        values, shares = _sorted(jnp.where(weights[:, None] > 0, rows, jnp.inf), weights)
        place = jnp.arange(len(rows))[:, None]
        shares = jnp.where((place >= trim) & (place < there - trim), shares, 0)
        return jnp.where(shares > 0, shares * values, 0).sum(0) / shares.sum(0)


@dataclass(frozen=True)
class GeometricMedian(Robust):
    """The point to which the weighted sum of all workers' distances is least: Weiszfeld's steps, from the mean.

    Distances are between whole values, so they are added up over the slices. The point is a mean of the workers'
    values by weights of its own, and these follow from the distances between any two workers: a small matrix, which is
    all that slices have to tell each other.
    """

    name = "geometric_median"

    def statistics(self, rows: jax.Array, first: Any) -> jax.Array:
        """shape=(workers, workers + 2): squared distances, what is not finite, and the weight."""
        is_weight = first & (jnp.arange(rows.shape[1]) == 0)
        bad = ~jnp.isfinite(rows).all(1)
        values = jnp.where(bad[:, None] | is_weight[None], jnp.zeros((), rows.dtype), rows)
        squares = jnp.stack([((values - row[None]) ** 2).sum(1) for row in values])
        weights = super().statistics(rows, first)
        return jnp.concatenate([squares, bad[:, None].astype(rows.dtype), weights[:, None]], 1)

    def reduced(self, rows: jax.Array, statistics: Any, step: Any, number: Any) -> jax.Array:
        n = len(rows)
        weights = jnp.where(statistics[:, n] > 0, 0, statistics[:, n + 1])
        shares = _weiszfeld(statistics[:, :n], weights).astype(rows.dtype)
        return jnp.where(shares[:, None] > 0, shares[:, None] * rows, 0).sum(0)


def _weiszfeld(squares: jax.Array, weights: jax.Array) -> jax.Array:
    """By what weights, which sum to 1, workers' values average to their geometric median.

    Args:
      squares: of the distances between any two.
    """
    scale = jnp.where(weights > 0, squares, 0).max()
    least = jnp.finfo(squares.dtype).eps * jnp.sqrt(scale)  # a distance below which a worker's value is the median

    def distances(shares: jax.Array) -> jax.Array:
        found = squares @ shares - shares @ squares @ shares / 2
        return jnp.sqrt(jnp.maximum(found, 0))

    def better(shares: jax.Array) -> jax.Array:
        pull = weights / jnp.maximum(distances(shares), least + jnp.finfo(squares.dtype).tiny)
        return pull / pull.sum()

    def moves(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        steps, before, shares = state
        return (steps < _STEPS) & (jnp.abs(shares - before).max() > jnp.finfo(squares.dtype).eps)

    first = weights / weights.sum()
    start = jnp.zeros((), jnp.int32), jnp.zeros_like(first), first
    return jax.lax.while_loop(moves, lambda state: (state[0] + 1, state[2], better(state[2])), start)[2]


def _sorted(values: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each element all workers' values, from the least on, and beside each its worker's weight."""
    shares = jnp.broadcast_to(weights[:, None], values.shape).astype(values.dtype)
    if len(values) >= _SORTED_BY_SORT:
        by_value = jax.lax.sort((values, shares), dimension=0, num_keys=1)
        return by_value[0], by_value[1]
    rows, own = list(values), list(shares)
    for turn in range(len(rows)):  # neighbours are exchanged until all is in order: no gathering, so one pass for XLA
        for i in range(turn % 2, len(rows) - 1, 2):
            swap = rows[i] > rows[i + 1]
            rows[i], rows[i + 1] = jnp.where(swap, rows[i + 1], rows[i]), jnp.where(swap, rows[i], rows[i + 1])
            own[i], own[i + 1] = jnp.where(swap, own[i + 1], own[i]), jnp.where(swap, own[i], own[i + 1])
    return jnp.stack(rows), jnp.stack(own)


def robust_of(op: Robust | str) -> Robust:
    """The reduction that `op=` asks for.

    Raises:
      CollectiveError: it trims more than there are workers.
    """
    if not isinstance(op, Robust):
        return Median()
    workers = known_workers()
    if isinstance(op, TrimmedMean) and workers is not None and 1 < workers <= 2 * op.trim:
        most = (workers - 1) // 2
        instead = f"op=comm.trimmed_mean({most})" if most else "op='mean'"
        raise error(
            "all_reduce",
            f"op=comm.trimmed_mean({op.trim}) leaves out {2 * op.trim} workers' values, and there are {workers}. With "
            f"so many, write  {instead}",
        )
    return op


def robustly(how: Robust, tree: T, leaves: dict[str, jax.Array], weight: jax.Array, when: jax.Array | None) -> T:
    """A tree, as one vector, reduced over the workers: of each, the mean over its own examples, and their weight."""
    if not isinstance(weight, jax.core.Tracer) and jnp.isnan(weight):
        raise error(
            "all_reduce",
            f"op={how.name!r} outside a program: how many examples each worker has is known only inside one. Say what "
            "each one's vote is:\n    comm.all_reduce(x, op=…, weight=1)",
        )
    own = combine(LocalMean(), leaves, leaves, weight=weight)
    dtype = jnp.float64 if any(leaf.dtype == jnp.float64 for leaf in leaves.values()) else jnp.float32
    flat = [x.astype(dtype).reshape(-1) for x in (local_sum({"": weight})[""], *own.values())]
    (vector,) = collective(RobustReduce(how), [jnp.concatenate(flat)], names=[_name(leaves)], when=when)
    ends = list(accumulate((leaf.size for leaf in leaves.values()), initial=1))
    pieces = [vector[start:stop] for start, stop in pairwise(ends)]
    new = [x.reshape(leaf.shape).astype(leaf.dtype) for x, leaf in zip(pieces, leaves.values(), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), new)


def _name(leaves: dict[str, jax.Array]) -> str:
    first = next(iter(leaves))
    return first if len(leaves) == 1 else f"{first} and {len(leaves) - 1} more"


def trimmed_mean(trim: int) -> TrimmedMean:
    """A reduction for `all_reduce(op=…)`: of each element the mean without its greatest and its least values.

    Args:
      trim: how many workers' values are left out at either end.

    Raises:
      CollectiveError: it is no number of workers, 1 or more.

    Example:
      >>> import jax.numpy as jnp, collectives as comm
      >>> print(comm.all_reduce(jnp.ones(2), op=comm.trimmed_mean(1)))  # outside a program: one worker
      [1. 1.]
    """
    number = whole(trim)
    if number is None or number < 1:
        raise error("trimmed_mean", f"{trim!r} is no number of workers that is left out at either end, 1 or more.")
    return TrimmedMean(number)


def geometric_median() -> GeometricMedian:
    """A reduction for `all_reduce(op=…)`: the point to which the sum of all workers' distances is least.

    Holds as long as the bad workers' weight is less than half. The tree is one vector: distances are of all of it.

    Example:
      >>> import jax.numpy as jnp, collectives as comm
      >>> print(comm.all_reduce(jnp.ones(2), op=comm.geometric_median()))  # outside a program: one worker
      [1. 1.]
    """
    return GeometricMedian()


@dataclass(frozen=True)
class RobustReduce(Collective):
    """One vector of those of all workers, in front of which each worker's weight stands."""

    how: Robust

    name = "all_reduce"
    must_be_finite = True
    is_linear = False

    @property
    def op(self) -> Robust:
        return self.how

    def encode_nothing(self, shape: tuple[int, ...], dtype: Any, worker: int, workers: int) -> jax.Array:
        return jnp.zeros(shape, dtype)

    def of_replicated(self, x: jax.Array, workers: int) -> jax.Array:
        return x

    @property
    def label(self) -> str:
        return self.how.name

    @property
    def about(self) -> str:
        return f"all_reduce(op={self.how})"
