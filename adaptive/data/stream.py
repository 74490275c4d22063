"""The stream of examples, in which each example occurs once per epoch, even if batch sizes or workers change.

The stream is the concatenation of epochs, each in its own order. A step takes the next `global_batch` positions, and
each worker its share of them, in the order of workers. So the set and order of examples depend only on the seed and the
global batches, not on the split or the number of workers. The cursor is one integer. A batch that spans the end of an
epoch takes examples of both epochs, and so can hold one example twice.

With a data set per worker (`Shards`), each worker has such a stream, with its own cursor. The example at a position is
read by `Lookahead` for data with an index, and by `IterableData` for iterators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate, repeat
from operator import getitem
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.errors import DataError

from .example import joined
from .iterators import IterableData
from .lookahead import Lookahead, PositionSpan
from .rows import Data, Rows

_SMALL = 1 << 20  # bytes of a share of arrays in memory that are read in the calling thread, sooner than one wakes up


class Share(NamedTuple):
    """The examples of this process in a step: one batch per worker of the process; `None` for one without examples."""

    sizes: tuple[int, ...]  # batch sizes of all workers
    offsets: tuple[int, ...]  # where in the step's global batch the examples of each worker of this process start
    batches: tuple[Any, ...]
    whole: Any = None  # one batch of which `batches` are slices, if there is one


Cursors = tuple[int, ...]  # examples taken so far from each shard


class Stream:
    """The stream of one process, with prefetching: fetches the next share while the current step computes.

    Args:
      data: the data set.
      seed: the seed of the permutations.
      workers: the workers of this process.
      beside: whether rows of arrays in memory are prefetched while kernels run. If kernels run on the same cores, that
        would slow down both by more than the time of the rows; then rows are taken on demand.

    Attributes:
      cursors: examples taken so far from each shard. Replicated.
      length: number of examples in an epoch; 0 for iterators.
      in_memory: whether examples are rows of arrays in memory.
      goes_back: whether `go_back` is possible: not for iterators.
    """

    def __init__(self, data: Data, *, seed: int, workers: range, beside: bool = True):
        self.seed, self.workers = seed, workers
        self.shard_ranges = data.shard_ranges
        self.cursors: Cursors = (0,) * len(self.shard_ranges)
        self.length, self.in_memory = 0, data.in_memory
        self.goes_back = not isinstance(data, IterableData)
        self._data, self._thread = data, data.thread
        if isinstance(data, Rows):
            self._lookahead, self.length = Lookahead(data, seed), len(data)
            self._order, self._rows = self._lookahead.order.examples, data.rows
        elif isinstance(data, IterableData):
            data.seed = seed
        self._ahead: tuple[Cursors, tuple[int, ...], Future[Share] | Share] | None = None
        self._before: Cursors = ()  # the cursors when `_ahead` was requested
        self._small: Sequence[int] | None = None  # the last sizes that `_is_small`
        self._closed = False
        self._beside = beside
        # Rows of arrays in memory, of one shard: nothing is read ahead or kept.
        self._simple = self.in_memory and len(self.shard_ranges) == 1
        self._row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(data.example))

    @property
    def consumed(self) -> int:
        """Examples taken so far, over all workers."""
        return sum(self.cursors)

    @property
    def epoch(self) -> int:
        """Whole epochs of data consumed. Replicated."""
        return int(self.epochs)

    @property
    def epochs(self) -> float:
        """Epochs of data consumed, as a fraction. Replicated."""
        return self._data.epochs(self.cursors)

    @property
    def epoch_length(self) -> int | None:
        """Number of examples in an epoch; `None` if it is unknown, or there are no epochs. Replicated."""
        return self._data.epoch_length(self.cursors)

    def check_epochs(self, instead: str) -> None:
        """Raise if the epochs of the data are unknown.

        Args:
          instead: what to write instead of an option in epochs, for the error.

        Raises:
          DataError: the epochs are unknown.
        """
        why = self._data.why_no_epochs()
        if why:
            raise DataError(f"{why}. Write {instead}, or pass the length= of an epoch to from_iterator.")

    def in_words(self) -> list[str]:
        """Return notes for the user on how the data are read."""
        read = isinstance(self._data, Rows) and not self._data.by_row
        return [f"data with an index: {self._data!r}, each once per epoch"] * read + [*self._data.notes]

    def take(self, sizes: Sequence[int]) -> Share:
        """Return the share of the step at the cursors, without moving them: call `advance` after the step."""
        ahead = self._ahead
        if ahead is not None and ahead[0] == self.cursors and ahead[1] == tuple(sizes):
            found, self._ahead = ahead[2], None
            return found if isinstance(found, Share) else self._thread.result(found)
        if ahead is not None:
            self._drop_ahead()
        if sizes is self._small or self._is_small(sizes):
            self._small = sizes
            return self._take_rows(self.cursors[0], tuple(sizes))
        return self._thread.call(self._fetch, self.cursors, tuple(sizes), self.cursors)

    def prefetch(self, sizes: Sequence[int]) -> None:
        """Start to fetch the share of the step after this one, assuming unchanged batch sizes."""
        self._before = before = self.cursors
        if sizes is self._small or self._is_small(sizes):
            if self._beside:
                end = before[0] + sum(sizes)
                self._ahead = (end,), tuple(sizes), self._take_rows(end, tuple(sizes))
            return
        after, sizes = self._deal(before, sizes)[1], tuple(sizes)
        self._ahead = after, sizes, self._thread.submit(self._fetch, after, sizes, before)

    def _is_small(self, sizes: Sequence[int]) -> bool:
        """Return whether a share is taken from arrays in memory in less time than a thread needs to wake up."""
        return self._simple and self._row_bytes * sum(sizes) <= _SMALL * len(sizes)

    def _take_rows(self, cursor: int, sizes: tuple[int, ...]) -> Share:
        """Return a share of arrays in memory. Makes as few calls as possible, since this runs in every step."""
        workers, ends = self.workers, list(accumulate(sizes, initial=0))
        first, last = ends[workers.start], ends[workers.stop]
        whole = self._rows(self._order(0, cursor + first, last - first)) if last > first else None
        batches = (whole,) if len(workers) == 1 else self._parts(whole, ends)
        # tuple.__new__ runs in C; the named tuple's constructor does not.
        return tuple.__new__(Share, (sizes, tuple(ends[workers.start : workers.stop]), batches, whole))

    def _parts(self, whole: Any, ends: Sequence[int]) -> tuple[Any, ...]:
        """Return each worker's part of a batch of this process."""
        leaves, tree = jax.tree.flatten(whole)
        first, batches = ends[self.workers.start], []
        for worker in self.workers:
            rows = slice(ends[worker] - first, ends[worker + 1] - first)
            part = list(map(getitem, leaves, repeat(rows)))
            batches.append(tree.unflatten(part) if rows.stop > rows.start else None)
        return tuple(batches)

    def advance(self, sizes: Sequence[int]) -> None:
        """Move the cursors past a step of these batch sizes."""
        ahead = self._ahead
        if ahead is not None and ahead[1] == tuple(sizes) and self._before == self.cursors:
            self.cursors = ahead[0]  # already computed by `prefetch`
        elif len(self.cursors) == 1:
            self.cursors = (self.cursors[0] + sum(sizes),)
        else:
            self.cursors = self._deal(self.cursors, sizes)[1]

    def peek(self, sizes: Sequence[int]) -> Any:
        """Return all workers' examples in a step of these sizes as one batch, without moving the cursors.

        Raises:
          DataError: workers of other processes have their own iterators.
        """
        data = self._data
        if isinstance(data, IterableData) and data.how.per_worker and len(sizes) > len(self.workers):
            raise DataError("each worker has an iterator of its own, which others cannot read. Pass a batch to check.")
        batches = self._thread.call(self._read, self.cursors, tuple(sizes), range(len(sizes)), self.cursors)
        return joined([batch for batch in batches if batch is not None])

    def _drop_ahead(self) -> None:
        """Drop the prefetched share, or cancel its fetch."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not isinstance(ahead[2], Share):
            ahead[2].cancel()

    def _fetch(self, cursors: Cursors, sizes: tuple[int, ...], committed: Cursors) -> Share:
        offsets = list(accumulate(sizes, initial=0))
        batches = tuple(self._read(cursors, sizes, self.workers, committed))
        return Share(sizes, tuple(offsets[self.workers.start : self.workers.stop]), batches)

    def _read(self, cursors: Cursors, sizes: tuple[int, ...], workers: range, committed: Cursors) -> list[Any]:
        """Return the batches of these workers in the step at the cursors. Called in the thread that reads."""
        steps = self._spans(cursors, sizes, workers)
        if isinstance(self._data, IterableData):
            return self._data.read(next(steps), committed, self._deal(cursors, sizes)[1])
        return self._lookahead.read(next(steps), steps, committed)

    def _spans(self, cursors: Cursors, sizes: tuple[int, ...], workers: range) -> Iterator[list[PositionSpan]]:
        """Yield the spans of these workers in the step at the cursors, and in the steps after it."""
        while True:
            starts, cursors = self._deal(cursors, sizes)
            yield [PositionSpan(w if len(cursors) > 1 else 0, starts[w], sizes[w]) for w in workers]

    def _deal(self, cursors: Cursors, sizes: Sequence[int]) -> tuple[list[int], Cursors]:
        """Return each worker's first position in its shard, and the cursors after the step."""
        if len(cursors) > 1:
            return list(cursors), tuple(cursor + size for cursor, size in zip(cursors, sizes, strict=True))
        *starts, end = accumulate(sizes, initial=cursors[0])
        return starts, (end,)

    def indices(self, position: int, count: int, shard: int = 0) -> np.ndarray:
        """Return the indices of the examples at `count` positions of a shard, for data with an index."""
        return self._lookahead.indices(PositionSpan(shard, position, count))

    def place(self) -> str:
        """Return the text that, with the cursors, is needed to resume here; "" for data with an index."""
        return self._data.place(self.cursors)

    def go_on(self, cursors: Cursors, place: str) -> None:
        """Resume at the point of another stream of these data.

        Args:
          cursors: the cursors of the other stream.
          place: the result of its `place()`.
        """
        self._drop_ahead()
        self.cursors = cursors
        self._thread.call(self._go_on, cursors, place)

    def _go_on(self, cursors: Cursors, place: str) -> None:
        self._data.go_on(cursors, place)
        if isinstance(self._data, Rows):
            self._lookahead.forget_all()

    def go_back(self, cursors: Cursors) -> None:
        """Go back to earlier cursors of this stream."""
        self._drop_ahead()
        self.cursors = cursors

    def close(self) -> None:
        """Close the data, reader processes and iterators included, without waiting for reads: one may hang."""
        if not self._closed:
            self._closed = True
            self._drop_ahead()
            self._data.close()
