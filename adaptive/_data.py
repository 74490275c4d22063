"""The stream of examples: every one once per epoch, whatever is resized.

Epoch after epoch, each in an order of its own, lie end to end. A step takes the next `global_batch` positions, and each
worker its share of them, in the order of workers. So the set and order of examples depend on the seed and the global
batches alone, and not on the split nor on the number of workers. The cursor is one integer.

Where workers have data of their own (`Shards`), there is such a *lane* for each of them, with a cursor of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from ._errors import DataError
from ._surroundings import settings_here
from ._trace import leaf_names

T = TypeVar("T")
QUICK_SECONDS = 300e-6


@runtime_checkable
class RandomAccess(Protocol):
    """A grain-like source: `source[i]` is one example, a pytree of arrays and numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Lane(NamedTuple):
    """Rows of a data set that are gone through once per epoch: `length` of them from number `start` on."""

    start: int
    length: int


class Rows(Protocol):
    """A data set, as the program reads it: rows by their numbers. `Examples`, or the `Shards` made of several."""

    length: int
    example: Any  # one row, on the host
    lanes: tuple[Lane, ...]  # one that all workers share, or one for each worker

    @property
    def in_memory(self) -> bool:
        """Whether rows are read without a source's code."""
        ...

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray) -> Any:
        """The examples numbered `indices`, stacked."""
        ...

    def shapes(self, examples: int) -> Any:
        """A batch of that many examples, as shapes."""
        ...


class Examples:
    """A data set: rows by their numbers.

    Args:
      data: a pytree of arrays with one leading axis, or a `RandomAccess` source.

    Raises:
      DataError: leaves of different lengths, no leaves, or no examples.
    """

    def __init__(self, data: Any):
        is_source = not isinstance(data, dict | tuple | list) and not hasattr(data, "shape")
        self._source = data if is_source and isinstance(data, RandomAccess) else None
        if self._source is not None:
            self.length = len(self._source)
            if self.length == 0:
                raise DataError("the data set is empty: len(data) is 0.")
            self.example = jax.tree.map(_host, self._source[0])
            _check_numbers(self.example, "data[0]")
        else:
            self._arrays = jax.tree.map(_host, data)
            self.length = self._check_arrays()
            self.example = jax.tree.map(lambda a: a[0], self._arrays)
        self.lanes: tuple[Lane, ...] = (Lane(0, self.length),)

    def _check_arrays(self) -> int:
        names = leaf_names(self._arrays, "data")
        leaves = jax.tree.leaves(self._arrays)
        if not leaves:
            raise DataError(
                f"the data set has no arrays: {self._arrays!r}. Give a pytree of arrays with one leading axis."
            )
        _check_numbers(self._arrays, "data")
        for name, leaf in zip(names, leaves, strict=True):
            if leaf.ndim == 0:
                raise DataError(f"{name} is a single number; every leaf needs a leading axis, one row per example.")
        lengths = {leaf.shape[0] for leaf in leaves}
        if len(lengths) > 1:
            listed = ", ".join(f"{name}: {leaf.shape[0]}" for name, leaf in zip(names, leaves, strict=True))
            raise DataError(f"the data set's leaves have different numbers of examples: {listed}.")
        (length,) = lengths
        if length == 0:
            raise DataError(f"the data set is empty: {names[0]} has shape {leaves[0].shape}.")
        return length

    def __len__(self) -> int:
        return self.length

    @property
    def in_memory(self) -> bool:
        return self._source is None

    def rows(self, indices: np.ndarray) -> Any:
        """The examples numbered `indices`, stacked."""
        if self._source is None:
            return jax.tree.map(lambda a: a[indices], self._arrays)
        rows = (self._row(self._source, int(i)) for i in indices)
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

    def _row(self, source: RandomAccess, index: int) -> Any:
        row = jax.tree.map(_host, source[index])
        if jax.tree.structure(row) != jax.tree.structure(self.example):
            raise DataError(
                f"example {index} is built as {jax.tree.structure(row)}, "
                f"example 0 as {jax.tree.structure(self.example)}."
            )
        for name, leaf, first in zip(
            leaf_names(row, "example"), jax.tree.leaves(row), jax.tree.leaves(self.example), strict=True
        ):
            if leaf.shape != first.shape:
                raise DataError(f"{name} of example {index} has shape {leaf.shape}, of example 0 {first.shape}.")
        return row

    def shapes(self, examples: int) -> Any:
        """A batch of that many examples, as shapes."""
        return shapes_of(self.example, examples)


def shapes_of(example: Any, examples: int) -> Any:
    """A batch of examples like this one, as shapes."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((examples, *a.shape), jax.dtypes.canonicalize_dtype(a.dtype)), example
    )


_NO_NUMBERS = {"O": "Python objects", "U": "text", "S": "bytes", "M": "times", "m": "times"}  # by numpy's kinds


def _check_numbers(tree: Any, root: str) -> None:
    for name, leaf in zip(leaf_names(tree, root), jax.tree.leaves(tree), strict=True):
        if leaf.dtype.kind in _NO_NUMBERS:
            raise DataError(f"{name} holds {_NO_NUMBERS[leaf.dtype.kind]}; every leaf needs to be an array of numbers.")


def _host(leaf: Any) -> np.ndarray:
    """On the host, in the width that JAX computes with: the cast is made once and not in every step."""
    array = np.asarray(leaf)
    return (
        array
        if array.dtype.kind in _NO_NUMBERS
        else array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    )


class Share(NamedTuple):
    """What this process computes in a step: one batch per worker that it carries."""

    sizes: tuple[int, ...]  # of all workers
    offsets: tuple[int, ...]  # of this process's workers: where in the step's global batch their examples start
    batches: tuple[Any, ...]


Cursors = tuple[int, ...]  # examples taken so far from each lane


class _There(NamedTuple):
    """A share that was not worth a thread, in place of a future one."""

    share: Share

    def result(self, timeout: float | None = None) -> Share:
        del timeout
        return self.share

    def cancel(self) -> None:
        """Nothing to stop."""


class Stream:
    """Shares of the stream, the next one fetched while the current one is being computed on.

    Args:
      examples: the data set.
      seed: of the permutations.
      workers: the workers of this process.
    """

    def __init__(self, examples: Rows, *, seed: int, workers: range):
        self.examples, self.seed, self.workers = examples, seed, workers
        self.lanes = examples.lanes
        self.cursors: Cursors = (0,) * len(self.lanes)
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="adaptive-input")
        self._settings = settings_here()  # of the thread that the data set was looked at in
        self._ahead: tuple[Cursors, tuple[int, ...], Future[Share] | _There] | None = None
        self._quick = False  # whether the last share was fetched faster than a thread is woken up

    @property
    def consumed(self) -> int:
        """Examples taken so far, over all workers."""
        return sum(self.cursors)

    def take(self, sizes: Sequence[int]) -> Share:
        """The step's share. Moves nothing: call `advance` when the step is committed."""
        key = (self.cursors, tuple(sizes))
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead[:2] == key:
                return ahead[2].result()
            ahead[2].cancel()
        return self._in_thread(self._fetch, *key).result()  # in one thread always, so sources need no locks

    def prefetch(self, sizes: Sequence[int]) -> None:
        """Start to fetch what the step after this one takes if nothing is resized."""
        key = (self._deal(self.cursors, sizes)[1], tuple(sizes))
        # A few rows of arrays are there sooner than another thread is.
        ahead = _There(self._fetch(*key)) if self._quick else self._in_thread(self._fetch, *key)
        self._ahead = (*key, ahead)

    def advance(self, sizes: Sequence[int]) -> None:
        """A step of these sizes is done."""
        self.cursors = self._deal(self.cursors, sizes)[1]

    def peek(self, sizes: Sequence[int]) -> Any:
        """All workers' examples in a step of these sizes, as one batch, in the order of workers. Moves nothing."""
        indices = np.concatenate(self._indices(self.cursors, sizes, range(len(sizes))))
        return self._in_thread(self.examples.rows, indices).result()

    def _in_thread(self, function: Callable[..., T], *args: Any) -> Future[T]:
        def run() -> T:
            with self._settings():
                return function(*args)

        return self._pool.submit(run)

    def _fetch(self, cursors: Cursors, sizes: tuple[int, ...]) -> Share:
        began = time.thread_time()  # its own time: kernels may be running on this core meanwhile
        offsets = list(accumulate(sizes, initial=0))
        batches = tuple(self.examples.rows(i) for i in self._indices(cursors, sizes, self.workers))
        self._quick = self.examples.in_memory and time.thread_time() - began < QUICK_SECONDS
        return Share(sizes, tuple(offsets[w] for w in self.workers), batches)

    def _indices(self, cursors: Cursors, sizes: Sequence[int], workers: range) -> list[np.ndarray]:
        """Which examples each of these workers takes."""
        starts, _ = self._deal(cursors, sizes)
        return [self.indices(starts[w], sizes[w], self._lane_of(w)) for w in workers]

    def _deal(self, cursors: Cursors, sizes: Sequence[int]) -> tuple[list[int], Cursors]:
        """Each worker's first position in its lane, and where the cursors are behind the step."""
        if len(self.lanes) == 1:
            *starts, end = accumulate(sizes, initial=cursors[0])
            return starts, (end,)
        starts, moved = [], list(cursors)
        for worker, size in enumerate(sizes):
            lane = self._lane_of(worker)
            starts.append(moved[lane])
            moved[lane] += size
        return starts, tuple(moved)

    def _lane_of(self, worker: int) -> int:
        return worker if len(self.lanes) > 1 else 0

    def indices(self, position: int, count: int, lane: int = 0) -> np.ndarray:
        """Which examples stand at `count` positions of a lane."""
        start, length = self.lanes[lane]
        found = []
        while count > 0:
            epoch, first = divmod(position, length)
            rows = self._order(lane, epoch)[first : first + count]
            found.append(rows + start if start else rows)
            position, count = position + len(found[-1]), count - len(found[-1])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _order(self, lane: int, epoch: int) -> np.ndarray:
        order = self._orders.get((lane, epoch))
        if order is None:
            # Philox numbers 2**256 blocks from a counter on: lanes start where no other gets to.
            philox = np.random.Philox(key=[self.seed & (2**63 - 1), epoch], counter=[0, 0, 0, lane])
            order = self._orders[lane, epoch] = np.random.Generator(philox).permutation(self.lanes[lane].length)
            self._orders.pop((lane, epoch - 2), None)
        return order

    def checkpoint(self) -> int | np.ndarray:
        """The cursor, or one for each lane."""
        return self.cursors[0] if len(self.lanes) == 1 else np.array(self.cursors)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
