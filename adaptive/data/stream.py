"""The stream of examples, in which each example occurs once per epoch, even if batch sizes or workers change.

The stream is the concatenation of epochs, each in its own order. A step takes the next `global_batch` positions, and
each worker its share of them, in the order of workers. So the set and order of examples depend only on the seed and the
global batches, not on the split or the number of workers. The cursor is one integer. A batch that spans the end of an
epoch takes examples of both epochs, and so can hold one example twice.

With a data set per worker (`Shards`), each worker has such a stream, with its own cursor. The example at a position is
read by `RandomAccessReader` for data with an index, and by `SequentialReader` for iterators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import accumulate, repeat
from operator import getitem
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from adaptive.base.ambient import AmbientContext
from adaptive.base.errors import DataError
from adaptive.base.world import World

from .examples import Rows
from .iterable import IterableData
from .random_access import PositionSpan, RandomAccessReader, Wanted
from .read_watch import ReadWatch
from .reading import joined
from .sequential import SequentialReader

T = TypeVar("T")
QUICK_SECONDS = 300e-6  # a share that takes less is fetched without a thread; somewhat more than a thread's wake-up
AT_ONCE_SECONDS = 2e-3  # the same limit if kernels run on the same cores


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
      world: the world whose other processes wait while this one reads; `None` if there are none.
      beside: whether rows of arrays in memory are prefetched while kernels run. If kernels run on the same cores, that
        would slow down both by more than the time of the rows; then rows are taken on demand.

    Attributes:
      cursors: examples taken so far from each shard. Replicated.
      length: number of examples in an epoch; 0 for iterators.
      in_memory: whether examples are rows of arrays in memory.
      fetched: called with the batches of each share, by the thread that has read them; `None`: nothing is called.
    """

    def __init__(
        self, data: Rows | IterableData, *, seed: int, workers: range, world: World | None = None, beside: bool = True
    ):
        self.data, self.seed, self.workers = data, seed, workers
        self.shard_ranges = data.shard_ranges
        self.cursors: Cursors = (0,) * len(self.shard_ranges)
        self._reader = (
            SequentialReader(data, seed) if isinstance(data, IterableData) else RandomAccessReader(data, seed)
        )
        self._watch = ReadWatch(data, world)
        self._ambient = AmbientContext()  # of the thread that builds the stream
        self._ahead: tuple[Cursors, tuple[int, ...], Future[Share] | Share] | None = None
        self._before: Cursors = ()  # the cursors when `_ahead` was requested
        self._closed = False
        self.fetched: Callable[[tuple[Any, ...]], None] | None = None
        self._beside = beside
        self._quick_seconds = QUICK_SECONDS if beside else AT_ONCE_SECONDS
        self._quick = False  # whether the last share was fetched faster than a thread would start
        self._timed = -1  # the number of rows whose time was measured last
        self.in_memory = data.in_memory and not data.mapped if not isinstance(data, IterableData) else False
        # Rows of arrays in memory, of one shard: the reader neither prefetches nor keeps anything.
        self._simple = self.in_memory and len(self.shard_ranges) == 1
        self.length = 0 if isinstance(data, IterableData) else len(data)
        if isinstance(self._reader, RandomAccessReader):
            self._order, self._rows = self._reader.order.examples, self._reader.data.rows

    @property
    def consumed(self) -> int:
        """Examples taken so far, over all workers."""
        return sum(self.cursors)

    @property
    def epoch(self) -> int:
        """Whole epochs of data consumed. Replicated."""
        return int(self.epochs) if isinstance(self._reader, SequentialReader) else sum(self.cursors) // self.length

    @property
    def epochs(self) -> float:
        """Epochs of data consumed, as a fraction. Replicated."""
        if isinstance(self._reader, SequentialReader):
            return self._reader.epochs(self.cursors)
        return sum(self.cursors) / self.length

    @property
    def epoch_length(self) -> int | None:
        """Number of examples in an epoch; `None` if it is unknown, or there are no epochs. Replicated."""
        return self._reader.epoch_length(self.cursors) if isinstance(self._reader, SequentialReader) else len(self.data)

    def check_epochs(self, instead: str) -> None:
        """Raise if the epochs of the data are unknown.

        Args:
          instead: what to write instead of an option in epochs, for the error.

        Raises:
          DataError: the epochs are unknown.
        """
        why = self.data.epochs_are_unknown() if isinstance(self.data, IterableData) else ""
        if why:
            raise DataError(f"{why}. Write {instead}, or pass the length= of an epoch to from_iterator.")

    def in_words(self) -> list[str]:
        """Return notes for the user on how the data are read."""
        if isinstance(self.data, IterableData) or self.data.in_memory:
            return list(self.data.notes)
        return [f"data with an index, read by {self.data.readers}: each example once per epoch", *self.data.notes]

    def take(self, sizes: Sequence[int]) -> Share:
        """Return the share of the step at the cursors, without moving them: call `advance` after the step."""
        ahead = self._ahead
        if ahead is not None and ahead[0] == self.cursors and ahead[1] == tuple(sizes):
            found, self._ahead = ahead[2], None
            return found if isinstance(found, Share) else self._watch.result(found)
        if ahead is not None:
            self._drop_ahead()
        if self._quick and self._simple and not self._beside:
            return self._take_rows(self.cursors[0], tuple(sizes))
        fetched = self._in_thread(self._fetch, self.cursors, tuple(sizes), self.cursors)
        return self._result(fetched)  # all reads run in one thread, so that sources need no locks

    def prefetch(self, sizes: Sequence[int]) -> None:
        """Start to fetch the share of the step after this one, assuming unchanged batch sizes."""
        self._before = before = self.cursors
        if self._quick and self._simple:
            if self._beside:
                end = before[0] + sum(sizes)
                self._ahead = (end,), tuple(sizes), self._take_rows(end, tuple(sizes))
            return
        key = (self._deal(before, sizes)[1], tuple(sizes))
        # A few rows of arrays are read faster than a thread wakes up.
        here = self._quick
        ahead = self._fetch(*key, before) if here else self._in_thread(self._fetch, *key, before)
        self._ahead = (*key, ahead)

    def _take_rows(self, cursor: int, sizes: tuple[int, ...]) -> Share:
        """Return a share of arrays in memory. Makes as few calls as possible, since this runs in every step."""
        workers, ends = self.workers, list(accumulate(sizes, initial=0))
        first, last = ends[workers.start], ends[workers.stop]
        began = time.thread_time() if last - first != self._timed else 0.0
        whole = self._rows(self._order(0, cursor + first, last - first)) if last > first else None
        batches = (whole,) if len(workers) == 1 else self._parts(whole, ends)
        if began:
            self._timed, self._quick = last - first, time.thread_time() - began < self._quick_seconds
        if self.fetched is not None:
            self.fetched(batches)
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
        elif self._simple:
            self.cursors = (self.cursors[0] + sum(sizes),)
        else:
            self.cursors = self._deal(self.cursors, sizes)[1]

    def peek(self, sizes: Sequence[int]) -> Any:
        """Return all workers' examples in a step of these sizes as one batch, without moving the cursors.

        Raises:
          DataError: workers of other processes have their own iterators.
        """
        if isinstance(self.data, IterableData) and self.data.how.per_worker and len(sizes) > len(self.workers):
            raise DataError("each worker has an iterator of its own, which others cannot read. Pass a batch to check.")
        wanted = self._wanted(self.cursors, sizes, range(len(sizes)), self.cursors)
        batches = self._watch.result(self._in_thread(self._reader.read, wanted))
        return joined([batch for batch in batches if batch is not None])

    def _drop_ahead(self) -> None:
        """Drop the prefetched share, or cancel its fetch."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not isinstance(ahead[2], Share):
            ahead[2].cancel()

    def _result(self, share: Future[Share] | Share) -> Share:
        return share if isinstance(share, Share) else self._watch.result(share)

    def _in_thread(self, function: Callable[..., T], *args: Any) -> Future[T]:
        return self.data.thread.submit(self._ambient.run, function, *args)

    def _fetch(self, cursors: Cursors, sizes: tuple[int, ...], committed: Cursors) -> Share:
        began = time.thread_time()  # processor time, since kernels may run on this core meanwhile
        offsets = list(accumulate(sizes, initial=0))
        batches = tuple(self._reader.read(self._wanted(cursors, sizes, self.workers, committed)))
        self._quick = self.in_memory and time.thread_time() - began < self._quick_seconds
        if self.fetched is not None:
            self.fetched(batches)
        return Share(sizes, tuple(offsets[self.workers.start : self.workers.stop]), batches)

    def _wanted(self, cursors: Cursors, sizes: Sequence[int], workers: range, committed: Cursors) -> Wanted:
        """Return the positions that these workers need in the step at the cursors, and in the steps to prefetch."""
        starts, end = self._deal(cursors, sizes)
        spans, following, cursors = [PositionSpan(self._shard_of(w), starts[w], sizes[w]) for w in workers], [], end
        for _ in range(self._reader.steps_ahead(sum(sizes[w] for w in workers))):
            starts, cursors = self._deal(cursors, sizes)
            following += [PositionSpan(self._shard_of(w), starts[w], sizes[w]) for w in workers]
        return Wanted(spans, following, committed, end)

    def _deal(self, cursors: Cursors, sizes: Sequence[int]) -> tuple[list[int], Cursors]:
        """Return each worker's first position in its shard, and the cursors after the step."""
        if len(self.shard_ranges) == 1:
            *starts, end = accumulate(sizes, initial=cursors[0])
            return starts, (end,)
        starts, moved = [], list(cursors)
        for worker, size in enumerate(sizes):
            shard = self._shard_of(worker)
            starts.append(moved[shard])
            moved[shard] += size
        return starts, tuple(moved)

    def _shard_of(self, worker: int) -> int:
        return worker if len(self.shard_ranges) > 1 else 0

    def indices(self, position: int, count: int, shard: int = 0) -> np.ndarray:
        """Return the indices of the examples at `count` positions of a shard, for data with an index."""
        assert isinstance(self._reader, RandomAccessReader)
        return self._reader.indices(PositionSpan(shard, position, count))

    def place(self) -> str:
        """Return the text that, with the cursors, is needed to resume here; "" for data with an index."""
        return self._reader.place(self.cursors) if isinstance(self._reader, SequentialReader) else ""

    def go_on(self, cursors: Cursors, place: str) -> None:
        """Resume at the point of another stream of these data.

        Args:
          cursors: the cursors of the other stream.
          place: the result of its `place()`.
        """
        self._drop_ahead()
        self.cursors = cursors
        if isinstance(self._reader, SequentialReader):
            self._watch.result(self._in_thread(self._reader.go_on, cursors, place))

    def close(self) -> None:
        """Close the data, reader processes and iterators included, without waiting for reads: one may hang."""
        if self._closed:
            return
        self._closed = True
        self._drop_ahead()
        if isinstance(self.data, IterableData):
            self.data.thread.submit(self.data.close)  # iterators are closed in the thread that reads them
        else:
            self.data.close()  # ends processes that the thread may be waiting for
