"""A data set per worker, for devices, hospitals and machines that may not share their data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import DataError
from adaptive.base.source_lines import name_workers
from adaptive.base.tree_paths import leaf_names
from adaptive.base.world import World

from .iterators import FromIterator, IterableData
from .rows import Passes, Rows, ShardRange, rows_of


class Shards(Rows):
    """One data set per worker, for `Program`'s `data`.

        program = ad.Program(driver, state, ad.Shards([data_0, data_1, data_2]), global_batch=96)

    Worker i takes its examples from shard i, in a new order for each epoch of the *shard*: each example once per shard
    epoch, even if batch sizes change. A batch that spans the end of a shard epoch can hold one example twice. The batch
    size is the number of examples per step, so a worker with a larger batch has more shard epochs. An epoch of the
    program is as many examples as all shards hold together, over all workers.

    Every process receives all shards and reads those of its own workers. `evaluate` treats the shards, one after
    another, as one data set.

    Args:
      data_sets: one data set per worker, in the workers' order: pytrees of arrays, or sources, as for `Program`. The
        examples of all must have the same structure, shapes and dtypes; the numbers of examples may differ.

    Raises:
      DataError: no data sets, an empty one, or examples that differ in structure, shape or dtype.
    """

    def __init__(self, data_sets: Iterable[Any]):
        if isinstance(data_sets, str | Mapping) or hasattr(data_sets, "shape"):
            raise DataError(f"Shards takes a list of data sets, one per worker; got a {type(data_sets).__name__}.")
        self._shards = [_rows(number, data) for number, data in enumerate(data_sets)]
        if not self._shards:
            raise DataError("Shards takes one data set per worker; got none.")
        self.example = self._shards[0].example
        for number, shard in enumerate(self._shards):
            _check_like(self.example, shard.example, number)
        ends = list(accumulate(len(shard) for shard in self._shards))
        self.length = ends[-1]
        self.shard_ranges = tuple(ShardRange(end - len(s), len(s)) for end, s in zip(ends, self._shards, strict=True))
        self._ends = np.array(ends)
        self.by_row = all(shard.by_row for shard in self._shards)
        self.in_memory = all(shard.in_memory for shard in self._shards)
        self.readers = max(shard.readers for shard in self._shards)
        self.processes = any(shard.processes for shard in self._shards)
        self.notes = tuple(dict.fromkeys(note for shard in self._shards for note in shard.notes))
        given = [shard.read_timeout for shard in self._shards if shard.read_timeout is not None]
        self.read_timeout = None if not given else 0.0 if 0.0 in given else max(given)

    def __repr__(self) -> str:
        return f"Shards of {' + '.join(str(shard.length) for shard in self.shard_ranges)} examples"

    def submit(self, indices: np.ndarray, passes: Passes) -> Future[list[Any]]:
        """Start to read the examples at these indices, all of one shard. Called in a fetch thread."""
        shard = int(np.searchsorted(self._ends, indices[0], side="right"))
        return self._shards[shard].submit(indices - self.shard_ranges[shard].start, passes)

    def close(self) -> None:
        """End the readers."""
        for shard in self._shards:
            shard.close()

    def rows(self, indices: np.ndarray) -> Any:
        """Return the examples at these indices of the concatenated shards as a batch; shape=(len(indices), …)."""
        shard_of = np.searchsorted(self._ends, indices, side="right")
        numbers = np.unique(shard_of)
        parts = [self._shards[k].rows(indices[shard_of == k] - self.shard_ranges[k].start) for k in numbers]
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.argsort(shard_of, kind="stable"))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *parts)


def stream_of(data: Any, workers: int, mine: Sequence[int], world: World | None = None) -> Rows | IterableData:
    """Return a user's training data as rows, or as iterators in progress if they have no index.

    Args:
      data: the data.
      workers: number of workers; `Shards` must have as many data sets.
      mine: the workers of this process.
      world: the world whose other processes wait while an iterator is read; `None` if there are none.

    Raises:
      DataError: the data cannot be used.
    """
    if isinstance(data, FromIterator):
        return IterableData(data, workers, mine, world)
    if isinstance(data, Shards) and len(data.shard_ranges) != workers:
        raise DataError(
            f"Shards of {len(data.shard_ranges)} data sets for {workers} workers. Pass one for each worker."
        )
    return rows_of(data)


def evaluated_rows(data: Any) -> Rows:
    """Return the data of `evaluate` as rows.

    Raises:
      DataError: the data cannot be used, or have no index.
    """
    if isinstance(data, FromIterator):
        raise DataError(
            "these data have no index and no known length, so they cannot be divided here. If they fit in memory, "
            "stack them:  jax.tree.map(lambda *xs: np.stack(xs), *rows(0))"
        )
    return rows_of(data)


def _rows(number: int, data: Any) -> Rows:
    if isinstance(data, FromIterator):
        raise DataError(
            f"shard {number} has no index. For an iterator per worker, pass a function with the parameter "
            "worker:  ad.data.from_iterator(lambda worker: …)"
        )
    try:
        return rows_of(data)
    except DataError as error:
        raise DataError(f"shard {number}: {error}") from None


def _check_like(first: Any, example: Any, number: int) -> None:
    if jax.tree.structure(example) != jax.tree.structure(first):
        raise DataError(
            f"shard {number} has the structure {jax.tree.structure(example)}, shard 0 has {jax.tree.structure(first)}."
        )
    for name, a, b in zip(leaf_names(first, "example"), jax.tree.leaves(first), jax.tree.leaves(example), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise DataError(
                f"{name} is {b.dtype}{list(b.shape)} in shard {number}, but {a.dtype}{list(a.shape)} in shard 0."
            )


def unused_shards(
    data: Rows | IterableData, sizes: Sequence[int], previous: Sequence[int], *, first: bool
) -> list[str]:
    """Return a note on the workers whose shards are not used from this step on, or [].

    Args:
      data: the data.
      sizes: batch sizes of this step.
      previous: batch sizes of the previous step.
      first: whether this is the first step.
    """
    if not isinstance(data, Shards):
        return []
    new = [w for w, size in enumerate(sizes) if size == 0 and (previous[w] or first)]
    return [f"no examples for {name_workers(new)}, whose data are not used."] if new else []
