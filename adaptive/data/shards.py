"""A data set per worker, for devices, hospitals and machines that may not share their data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import Any

import numpy as np

from adaptive.base.errors import DataError
from adaptive.base.world import World

from .example import checked, joined
from .iterators import FromIterator, IterableData
from .rows import Data, ReadRequest, Rows, ShardRange, rows_of


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
        self._shards = []
        for number, data in enumerate(data_sets):
            try:
                self._shards.append(indexed_rows(data))
            except DataError as error:
                raise DataError(f"shard {number}: {error}") from None
        if not self._shards:
            raise DataError("Shards takes one data set per worker; got none.")
        self.example = self._shards[0].example
        for number, shard in enumerate(self._shards):
            checked(shard.example, self.example, f"shard {number}", "shard 0")
        ends = list(accumulate(len(shard) for shard in self._shards))
        self.shard_ranges = tuple(ShardRange(end - len(s), len(s)) for end, s in zip(ends, self._shards, strict=True))
        self._ends = np.array(ends)
        self.by_row = all(shard.by_row for shard in self._shards)
        self.in_memory = all(shard.in_memory for shard in self._shards)
        self.readers = max(shard.readers for shard in self._shards)
        self.processes = any(shard.processes for shard in self._shards)
        given = [timeout for shard in self._shards if (timeout := shard.thread.read_timeout) is not None]
        super().__init__(None if not given else 0.0 if 0.0 in given else max(given))

    def __repr__(self) -> str:
        return f"Shards of {' + '.join(str(shard.length) for shard in self.shard_ranges)} examples"

    def submit(self, request: ReadRequest) -> Future[Any]:
        shard = int(np.searchsorted(self._ends, request.indices[0], side="right"))
        return self._shards[shard].submit(request._replace(indices=request.indices - self.shard_ranges[shard].start))

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def rows(self, indices: np.ndarray) -> Any:
        """Return examples of the concatenated shards as a batch; `indices` ascend."""
        parts = np.split(indices, np.searchsorted(indices, self._ends[:-1]))
        each = zip(self._shards, parts, self.shard_ranges, strict=True)
        return joined([shard.rows(part - start) for shard, part, (start, _) in each if len(part)])


def stream_of(data: Any, workers: int, mine: Sequence[int], world: World | None = None) -> Data:
    """Return a user's training data as rows, or as iterators in progress if they have no index.

    Args:
      data: the data.
      workers: number of workers; `Shards` must have as many data sets.
      mine: the workers of this process.
      world: the world whose other processes wait while this one reads; `None` for the current one.

    Raises:
      DataError: the data cannot be used.
    """
    if isinstance(data, FromIterator):
        return IterableData(data, workers, mine, world)
    if isinstance(data, Shards) and len(data.shard_ranges) != workers:
        raise DataError(
            f"Shards of {len(data.shard_ranges)} data sets for {workers} workers. Pass one for each worker."
        )
    rows = rows_of(data)
    rows.thread.world = world
    return rows


def indexed_rows(data: Any) -> Rows:
    """Return the data of `evaluate`, or of a shard, as rows.

    Raises:
      DataError: the data cannot be used, or have no index.
    """
    if isinstance(data, FromIterator):
        raise DataError(
            "these data have no index, and can be neither divided by `evaluate` nor a shard. If they fit in memory, "
            "stack them:  jax.tree.map(lambda *xs: np.stack(xs), *rows(0)). To train each worker on an iterator of its "
            "own, pass a function with the parameter worker:  ad.data.from_iterator(lambda worker: …)"
        )
    return rows_of(data)
