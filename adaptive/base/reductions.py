"""What a part of a message is reduced by, over the workers, where that is no sum and no extreme.

A world knows sums, maxima and minima by their names. Others are objects, of two kinds:

* `Sliced`: each worker gets a slice of all workers' values, reduces that, and all get all slices. What travels is that
  of an all-reduce (two times the part), but workers' values can be told apart where they are reduced, and may travel in
  another format than they are reduced in.
* `Mixed`: each worker gets the values of some others, and averages them with its own.

They are frozen dataclasses, equal on all workers, and compared by their fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np


class Sliced:
    """A reduction by slices of flat values. All of it is traced, on a CPU or where the workers compute.

    Attributes:
      adds_up: whether the values of one worker's kernel calls are added up; else they are the same in all of them.
      elementwise: whether each element is reduced by itself: then leaves may lie side by side in one part.
      is_sum: whether it is the sum of what workers send, but for rounding: then those of one host may be added up
        first, in single precision, and their sum be sent as one worker's.
    """

    adds_up = False
    elementwise = False
    is_sum = False

    def wire_dtype(self, dtype: np.dtype) -> np.dtype:
        """The format in which values of `dtype` travel."""
        return dtype

    def sent(self, x: jax.Array, step: Any, worker: Any) -> jax.Array:
        """A worker's flat value, in the format in which it travels."""
        return x

    def statistics(self, rows: jax.Array, first: Any) -> jax.Array | None:
        """Of one slice, what is summed over all slices before they are reduced; `None` where nothing is.

        Args:
          rows: shape=(workers, elements of the slice).
          first: whether it is the slice with the first element.
        """
        return None

    def further_statistics(self, rows: jax.Array, first: Any, statistics: jax.Array) -> jax.Array | None:
        """Return a second array that is summed over all slices, computed from the first sum; `None` if not needed.

        If it is not `None`, `reduced` gets the pair of both sums in the place of `statistics`.

        Args:
          rows, first: as in `statistics`, which must not have returned `None`.
          statistics: summed over all slices.
        """
        return None

    def reduced(self, rows: jax.Array, statistics: Any, step: Any, number: Any) -> jax.Array:
        """Slice number `number` of the result, in the format in which it travels. shape=(elements of the slice,)"""
        raise NotImplementedError

    def in_one_place(self, rows: Sequence[jax.Array], step: Any) -> jax.Array:
        """The result, where all values are in one place, as one slice: of the values' shape and dtype."""
        first = rows[0]
        stacked = jnp.stack([self.sent(x.reshape(-1), step, worker) for worker, x in enumerate(rows)])
        statistics = summed_statistics(self, stacked, True, lambda found: found)
        result = self.reduced(stacked, statistics, step, 0)
        return result.astype(first.dtype).reshape(first.shape)


class TakesStatistics(Protocol):
    """A `Sliced`, or its functions, compiled."""

    @property
    def statistics(self) -> Callable[..., Any]:
        """`Sliced.statistics`."""
        ...

    @property
    def further_statistics(self) -> Callable[..., Any]:
        """`Sliced.further_statistics`."""
        ...


def summed_statistics(op: TakesStatistics, rows: Any, first: Any, total: Callable[[Any], Any]) -> Any:
    """Return the `statistics` that `op.reduced` gets for a slice.

    Args:
      rows, first: as in `Sliced.statistics`.
      total: sums an array over all slices; all of them call it equally often.
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
        """For each member, whose values it averages in this step, its own among them, and by what weights.

        Equal on all workers. The weights of one mean sum to 1.

        Args:
          step: counted from 1.
          members: the seats with a worker on them, in order.
        """
        raise NotImplementedError

    def in_one_place(self, rows: Sequence[jax.Array], step: int, members: Sequence[int]) -> list[jax.Array]:
        """Each worker's result, where all values are in one place. Who is no member keeps its own."""
        weights = self.weights(step, members)
        return [
            average([(share, rows[other]) for other, share in sorted(weights[worker].items())])
            if worker in weights
            else rows[worker]
            for worker in range(len(rows))
        ]


Reduction = str | Sliced | Mixed


def average(weighed: Sequence[tuple[float, Any]]) -> Any:
    """A weighted mean, added up in the order given, so that all who have the same values get the same bits."""
    return reduce(lambda a, b: a + b, [x * np.asarray(share, x.dtype) for share, x in weighed])


def combine_calls(op: Reduction, a: jax.Array, b: jax.Array) -> jax.Array:
    """What a worker sends, of what two of its kernel calls have; traced."""
    if isinstance(op, str):
        return {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}[op](a, b)
    return a + b if op.adds_up else a


def adds_up(op: Reduction) -> bool:
    """Whether kernel calls' values are added up."""
    return op == "sum" if isinstance(op, str) else op.adds_up
