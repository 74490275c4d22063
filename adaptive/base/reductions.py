"""Reductions of a message's part over the workers, other than sums and extremes.

Worlds know "sum", "max" and "min" by name. Others are frozen dataclasses, equal on all workers, of two kinds:

* `Sliced`: each worker reduces one slice of all workers' values, and all receive all slices. The traffic is that of an
  all-reduce, but the reduction sees each worker's values, and they may be sent in another format.
* `Mixed`: each worker receives the values of some others, and averages them with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Sliced:
    """A reduction by slices of flat values. All methods are traced, for a CPU or for the workers' devices.

    Attributes:
      adds_up: whether values of a worker's microbatches are summed; if not, all microbatches have equal values.
      elementwise: whether each element is reduced by itself, so that several leaves may share one part.
      is_sum: whether the result is the sum, up to rounding. The values of one host may then be summed first, in single
        precision, and sent as one worker's value.
      skips_zeros: whether a value of zeros changes no result, so that it need not be sent.
    """

    adds_up = False
    elementwise = False
    is_sum = False
    skips_zeros = False

    @property
    def granule(self) -> int:
        """Return the number that divides the size of every slice."""
        return 1

    def wire_dtype(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype in which values of `dtype` are sent."""
        return dtype

    def sent(self, x: jax.Array, step: Any, worker: Any) -> jax.Array:
        """Return a worker's flat value in the dtype in which it is sent."""
        return x

    def statistics(self, rows: jax.Array, first: Any) -> jax.Array | None:
        """Return a slice's statistics, which are summed over all slices before `reduced`; `None` for none.

        Args:
          rows: shape=(workers, elements of the slice).
          first: whether the slice holds the first element.
        """
        return None

    def further_statistics(self, rows: jax.Array, first: Any, statistics: jax.Array) -> jax.Array | None:
        """Return a second array to sum over all slices, computed from the first sum; `None` for none. `reduced` then
        receives the pair of both sums.
        """
        return None

    def reduced(self, rows: jax.Array, statistics: Any, step: Any, number: Any) -> jax.Array:
        """Return slice `number` of the result, in the dtype in which it is sent; shape=(elements of the slice,)."""
        raise NotImplementedError

    def in_one_place(self, rows: Sequence[jax.Array], step: Any) -> jax.Array:
        """Return the result of values that are all on one device; of the values' shape and dtype."""
        first = rows[0]
        stacked = jnp.stack([self.sent(x.reshape(-1), step, worker) for worker, x in enumerate(rows)])
        statistics = summed_statistics(self, stacked, True, lambda found: found)
        result = self.reduced(stacked, statistics, step, 0)
        return result.astype(first.dtype).reshape(first.shape)


def summed_statistics(op: Any, rows: Any, first: Any, total: Callable[[Any], Any]) -> Any:
    """Return the `statistics` argument of `op.reduced` for a slice.

    Args:
      op: a `Sliced`, or its compiled functions.
      rows, first: as in `Sliced.statistics`.
      total: sums an array over all slices. Every slice calls it the same number of times.
    """
    statistics = op.statistics(rows, first)
    if statistics is None:
        return None
    statistics = total(statistics)
    further = op.further_statistics(rows, first, statistics)
    return statistics if further is None else (statistics, total(further))


class Mixed:
    """A weighted mean of each worker's value and some others': the results differ between workers."""

    adds_up = False
    elementwise = True

    def weights(self, step: int, members: Sequence[int]) -> Mapping[int, Mapping[int, float]]:
        """Return for each member the workers that it averages in this step, itself included, with their weights, which
        sum to 1. Equal on all workers.

        Args:
          step: counted from 1.
          members: the occupied worker slots, in order.
        """
        raise NotImplementedError

    def in_one_place(self, rows: Sequence[jax.Array], step: int, members: Sequence[int]) -> list[jax.Array]:
        """Return each worker's result of values that are all on one device. Non-members keep their own values."""
        weights = self.weights(step, members)
        return [
            average([(share, rows[other]) for other, share in sorted(weights[worker].items())])
            if worker in weights
            else rows[worker]
            for worker in range(len(rows))
        ]


Reduction = str | Sliced | Mixed


def average(weighed: Sequence[tuple[float, Any]]) -> Any:
    """Return a weighted mean. Bitwise reproducible: the sum is taken in the given order."""
    return reduce(lambda a, b: a + b, [x * np.asarray(share, x.dtype) for share, x in weighed])


def combine_microbatches(op: Reduction, a: jax.Array, b: jax.Array) -> jax.Array:
    """Combine the values of two microbatches of one worker; traced."""
    if isinstance(op, str):
        return {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[op](a, b)
    return a + b if op.adds_up else a


def adds_up(op: Reduction) -> bool:
    """Return whether a reduction sums the values of a worker's microbatches."""
    return op == "sum" if isinstance(op, str) else op.adds_up
