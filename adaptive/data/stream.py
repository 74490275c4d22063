"""The stream of examples: every one once per epoch, whatever is resized.

Epoch after epoch, each in an order of its own, lie end to end. A step takes the next `global_batch` positions, and each
worker its share of them, in the order of workers. So the set and order of examples depend on the seed and the global
batches alone, and not on the split nor on the number of workers. The cursor is one integer. A batch that spans the end
of an epoch takes examples in both orders, and so can hold one example twice.

Where workers have data of their own (`Shards`), each has such a *shard range*, with a cursor of its own. What stands at
a position is known to others: of data with an index to `RandomAccessReader`, of iterators to `SequentialReader`.
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
from .random_access import RandomAccessReader, Span, Wanted
from .read_watch import ReadWatch
from .reading import joined
from .sequential import SequentialReader

T = TypeVar("T")
QUICK_SECONDS = 300e-6  # as long as it takes to wake a thread up, and some
AT_ONCE_SECONDS = 2e-3  # where the kernels have the same cores


class Share(NamedTuple):
    """What this process computes in a step: one batch per worker that it carries; `None` for one without examples."""

    sizes: tuple[int, ...]  # of all workers
    offsets: tuple[int, ...]  # of this process's workers: where in the step's global batch their examples start
    batches: tuple[Any, ...]
    whole: Any = None  # the batches as one, where they are parts of it


Cursors = tuple[int, ...]  # examples taken so far from each shard


class Stream:
    """Shares of the stream, the next one fetched while the current one is being computed on.

    Args:
      data: the data set.
      seed: of the permutations.
      workers: the workers of this process.
      world: whose other processes wait while this one reads.
      beside: whether rows of arrays in memory are taken beside the kernels. Where kernels run on the same cores, that
        makes both slower by more than the time of the rows: they are taken when they are needed.

    Attributes:
      cursors: examples taken so far from each shard. Replicated.
      length: examples of an epoch; 0 of iterators.
      in_memory: whether examples are rows of arrays in memory.
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
        self._ambient = AmbientContext()  # of the thread that the data set was looked at in
        self._ahead: tuple[Cursors, tuple[int, ...], Future[Share] | Share] | None = None
        self._before: Cursors = ()  # where the cursors were when that was asked for
        self._closed = False
        self._beside = beside
        self._quick_seconds = QUICK_SECONDS if beside else AT_ONCE_SECONDS
        self._quick = False  # whether the last share was fetched so fast that no thread is worth it
        self._timed = -1  # the number of rows whose time is known to be short
        self.in_memory = data.in_memory and not data.mapped if not isinstance(data, IterableData) else False
        # Rows of arrays in memory, of one shard: nothing is read ahead, and nothing is kept.
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
        """Examples of an epoch; `None` if that is not known, or there are none. Replicated."""
        return self._reader.epoch_length(self.cursors) if isinstance(self._reader, SequentialReader) else len(self.data)

    def check_epochs(self, instead: str) -> None:
        """Raise if there are no epochs to go by.

        Args:
          instead: what to write.

        Raises:
          DataError: nobody can tell them.
        """
        why = self.data.epochs_are_unknown() if isinstance(self.data, IterableData) else ""
        if why:
            raise DataError(f"{why}. Write {instead}, or give from_iterator the length= of what counts as one.")

    def in_words(self) -> list[str]:
        """What can be relied on, of data that are not simply arrays."""
        if isinstance(self.data, IterableData) or self.data.in_memory:
            return list(self.data.notes)
        read = f"{self.data.num_readers} processes" if self.data.num_readers else "a thread"
        return [f"data with an index, read by {read}: each example once per epoch", *self.data.notes]

    def take(self, sizes: Sequence[int]) -> Share:
        """The step's share. Moves nothing: call `advance` when the step is committed."""
        ahead = self._ahead
        if ahead is not None and ahead[0] == self.cursors and ahead[1] == tuple(sizes):
            found, self._ahead = ahead[2], None
            return found if isinstance(found, Share) else self._watch.result(found)
        if ahead is not None:
            self._drop_ahead()
        if self._quick and self._simple and not self._beside:
            return self._take_rows(self.cursors[0], tuple(sizes))
        fetched = self._in_thread(self._fetch, self.cursors, tuple(sizes), self.cursors)
        return self._result(fetched)  # in one thread: sources need no locks

    def prefetch(self, sizes: Sequence[int]) -> None:
        """Start to fetch what the step after this one takes if nothing is resized."""
        self._before = before = self.cursors
        if self._quick and self._simple:
            if self._beside:
                end = before[0] + sum(sizes)
                self._ahead = (end,), tuple(sizes), self._take_rows(end, tuple(sizes))
            return
        key = (self._deal(before, sizes)[1], tuple(sizes))
        # A few rows of arrays are there sooner than another thread is.
        here = self._quick
        ahead = self._fetch(*key, before) if here else self._in_thread(self._fetch, *key, before)
        self._ahead = (*key, ahead)

    def _take_rows(self, cursor: int, sizes: tuple[int, ...]) -> Share:
        """Return a share of arrays in memory, by as few calls as can be: this is done in every step."""
        workers, ends = self.workers, list(accumulate(sizes, initial=0))
        first, last = ends[workers.start], ends[workers.stop]
        began = time.thread_time() if last - first != self._timed else 0.0
        whole = self._rows(self._order(0, cursor + first, last - first)) if last > first else None
        batches = (whole,) if len(workers) == 1 else self._parts(whole, ends)
        if began:
            self._timed, self._quick = last - first, time.thread_time() - began < self._quick_seconds
        # In C, which the initialiser is not.
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
        """A step of these sizes is done."""
        ahead = self._ahead
        if ahead is not None and ahead[1] == tuple(sizes) and self._before == self.cursors:
            self.cursors = ahead[0]  # as was worked out to fetch what follows
        elif self._simple:
            self.cursors = (self.cursors[0] + sum(sizes),)
        else:
            self.cursors = self._deal(self.cursors, sizes)[1]

    def peek(self, sizes: Sequence[int]) -> Any:
        """All workers' examples in a step of these sizes, as one batch, in the order of workers. Moves nothing.

        Raises:
          DataError: other processes have iterators of their own.
        """
        if isinstance(self.data, IterableData) and self.data.how.per_worker and len(sizes) > len(self.workers):
            raise DataError("each worker has an iterator of its own, which others cannot read. Give check a batch.")
        wanted = self._wanted(self.cursors, sizes, range(len(sizes)), self.cursors)
        batches = self._watch.result(self._in_thread(self._reader.read, wanted))
        return joined([batch for batch in batches if batch is not None])

    def _drop_ahead(self) -> None:
        """What was fetched ahead is not wanted any more."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not isinstance(ahead[2], Share):
            ahead[2].cancel()

    def _result(self, share: Future[Share] | Share) -> Share:
        return share if isinstance(share, Share) else self._watch.result(share)

    def _in_thread(self, function: Callable[..., T], *args: Any) -> Future[T]:
        return self.data.thread.submit(self._ambient.run, function, *args)

    def _fetch(self, cursors: Cursors, sizes: tuple[int, ...], committed: Cursors) -> Share:
        began = time.thread_time()  # its own time: kernels may be running on this core meanwhile
        offsets = list(accumulate(sizes, initial=0))
        batches = tuple(self._reader.read(self._wanted(cursors, sizes, self.workers, committed)))
        self._quick = self.in_memory and time.thread_time() - began < self._quick_seconds
        return Share(sizes, tuple(offsets[self.workers.start : self.workers.stop]), batches)

    def _wanted(self, cursors: Cursors, sizes: Sequence[int], workers: range, committed: Cursors) -> Wanted:
        """What these workers take in a step from the cursors on, and in those that follow it."""
        starts, end = self._deal(cursors, sizes)
        spans, following, cursors = [Span(self._shard_of(w), starts[w], sizes[w]) for w in workers], [], end
        for _ in range(self._reader.steps_ahead(sum(sizes[w] for w in workers))):
            starts, cursors = self._deal(cursors, sizes)
            following += [Span(self._shard_of(w), starts[w], sizes[w]) for w in workers]
        return Wanted(spans, following, committed, end)

    def _deal(self, cursors: Cursors, sizes: Sequence[int]) -> tuple[list[int], Cursors]:
        """Each worker's first position in its shard, and where the cursors are after the step."""
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
        """Which examples stand at `count` positions of a shard, of data that have an index."""
        assert isinstance(self._reader, RandomAccessReader)
        return self._reader.indices(Span(shard, position, count))

    def place(self) -> str:
        """What else than the cursors is needed to go on from here, as text; none of data that have an index."""
        return self._reader.place(self.cursors) if isinstance(self._reader, SequentialReader) else ""

    def go_on(self, cursors: Cursors, place: str) -> None:
        """Go on from where another stream of these data stood.

        Args:
          place: what its `place()` was.
        """
        self._drop_ahead()
        self.cursors = cursors
        if isinstance(self._reader, SequentialReader):
            self._watch.result(self._in_thread(self._reader.go_on, cursors, place))

    def close(self) -> None:
        """End the fetch thread and what the data keep open. Waits for no read: one that hangs is left behind."""
        if self._closed:
            return
        self._closed = True
        self._drop_ahead()
        if isinstance(self.data, IterableData):
            self.data.thread.submit(self.data.close)  # iterators are ended where they are read
        else:
            self.data.close()  # ends processes that the thread may be waiting for
