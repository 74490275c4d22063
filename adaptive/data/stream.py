"""The stream of examples, in which each example occurs once per epoch, even if batch sizes or workers change.

The stream is the concatenation of epochs, each in its own order. A step takes the next `global_batch` positions, and
each worker its share of them, in the order of workers. So the set and order of examples depend only on the seed and the
global batches, not on the split or the number of workers. The cursor is one integer. A batch that spans the end of an
epoch takes examples of both epochs, and so can hold one example twice.

With a data set per worker (`Shards`), each worker has such a stream, with its own cursor. The example at a position is
read by `Lookahead` for data with an index, and by `IterableData` for iterators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate, groupby, islice, repeat
from operator import add, getitem, itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.errors import DataError
from adaptive.base.world import World

from .example import joined
from .iterators import FromIterator, IterableData
from .order import Order
from .readers import ReaderThreads
from .rows import Data, PositionSpan, Rows, Shards, rows_of

_STEPS_AHEAD = 2  # for several readers; more until each has two reads to do


class Share(NamedTuple):
    """The examples of this process in a step: one batch per worker of the process; `None` for one without examples."""

    sizes: tuple[int, ...]  # batch sizes of all workers
    offsets: tuple[int, ...]  # where in the step's global batch the examples of each worker of this process start
    batches: tuple[Any, ...]
    whole: Any = None  # one batch of which `batches` are slices, if there is one


Cursors = tuple[int, ...]  # examples taken so far from each shard
Row = tuple[Future[Any], int]  # a read, and the number of a row in it


class Stream:
    """The stream of one process, with prefetching: fetches the next share while the current step computes.

    Args:
      workers: the workers of this process.
      beside: whether rows in memory are taken while kernels run. On the same cores that slows down both by more than
        the rows take.

    Attributes:
      cursors, lengths: examples taken so far from each shard, and its number of examples. Replicated.
      length: number of examples in an epoch; 0 for iterators.
      goes_back: whether `go_back` is possible: not for iterators.
    """

    def __init__(self, data: Data, *, seed: int, workers: range, beside: bool = True):
        self.seed, self.workers, self.lengths = seed, workers, data.lengths
        self.cursors: Cursors = (0,) * len(data.lengths)
        self._data, self._beside, self._closed = data, beside or not data.in_memory, False
        self._ahead: tuple[Cursors, tuple[int, ...], Callable[[], list[Any]]] | None = None
        self._examples: Lookahead | IterableData
        if isinstance(data, IterableData):
            self.goes_back, self.length, self._examples = False, 0, data
        else:
            assert isinstance(data, Rows)
            self.goes_back, self.length = True, len(data)
            self._examples = lookahead = Lookahead(data, seed)
            self._rows = lookahead.rows

    @property
    def epoch(self) -> int:
        """Whole epochs of data consumed. Replicated."""
        return int(self.epochs)

    @property
    def epochs(self) -> float:
        """Epochs of data consumed, as a fraction. Replicated."""
        return self._data.epochs(self.cursors)[0]

    @property
    def epoch_length(self) -> int | None:
        """Number of examples in an epoch; `None` if it is unknown. Replicated."""
        return self._data.epochs(self.cursors)[1]

    def check_epochs(self, instead: str) -> None:
        """Raise a DataError if the epochs of the data are unknown. `instead`: what to write instead of epochs."""
        if self._data.no_epochs:
            raise DataError(
                f"{self._data.no_epochs}. Write {instead}, or pass the length= of an epoch to from_iterator."
            )

    def take(self, sizes: Sequence[int]) -> Share:
        """Return the share of the step at the cursors, without moving them: call `advance` after the step."""
        sizes, ahead, self._ahead = tuple(sizes), self._ahead, None
        if ahead is None or ahead[:2] != (self.cursors, sizes):
            ahead = self.cursors, sizes, self._start(self.cursors, sizes, self.workers)
        return self._share(sizes, ahead[2]())

    def prefetch(self, sizes: Sequence[int]) -> None:
        """Start to read the share of the step after this one, assuming unchanged batch sizes."""
        if self._beside:
            sizes, after = tuple(sizes), self._after(self.cursors, sizes)
            self._ahead = after, sizes, self._start(after, sizes, self.workers)

    def advance(self, sizes: Sequence[int]) -> None:
        """Move the cursors past a step of these batch sizes."""
        one = len(self.cursors) == 1  # without a call: on the path of every step
        self.cursors = (self.cursors[0] + sum(sizes),) if one else self._after(self.cursors, sizes)

    def _after(self, cursors: Cursors, sizes: Sequence[int]) -> Cursors:
        """Return the cursors after a step."""
        return (cursors[0] + sum(sizes),) if len(cursors) == 1 else tuple(map(add, cursors, sizes))

    def _share(self, sizes: tuple[int, ...], found: list[Any]) -> Share:
        """Divide what was read for a step among the workers of this process."""
        workers, whole = self.workers, found[0] if len(self.cursors) == 1 else None
        offsets = tuple(list(accumulate(sizes, initial=0))[workers.start : workers.stop])
        if len(found) == len(workers):  # tuple.__new__ runs in C; the named tuple's constructor does not
            return tuple.__new__(Share, (sizes, offsets, tuple(found), whole))
        leaves, tree = jax.tree.flatten(whole)
        batches = []
        for start, size in zip(offsets, sizes[workers.start : workers.stop], strict=True):
            rows = slice(start - offsets[0], start - offsets[0] + size)
            batches.append(tree.unflatten(map(getitem, leaves, repeat(rows))) if size else None)
        return Share(sizes, offsets, tuple(batches), whole)

    def _start(self, cursors: Cursors, sizes: tuple[int, ...], workers: range) -> Callable[[], list[Any]]:
        """Start to read what these workers take in the step at the cursors; see `IterableData.start`."""
        if not self._data.in_memory:
            end = self._after(cursors, sizes)
            return self._examples.start(self._spans(cursors, sizes, workers), self.cursors, end)
        if len(cursors) > 1:
            found = [self._rows(worker, cursors[worker], sizes[worker]) for worker in workers]
        else:  # in few calls: on the path of every step
            first = cursors[0] + sum(sizes[: workers.start])
            found = [self._rows(0, first, sum(sizes[workers.start : workers.stop]))]
        return found.copy

    def _spans(self, cursors: Cursors, sizes: tuple[int, ...], workers: range) -> Iterator[list[PositionSpan]]:
        """Yield what these workers take in this step and the next ones: one span, or one for each with a cursor."""
        while True:
            if len(cursors) > 1:
                yield [PositionSpan(worker, cursors[worker], sizes[worker]) for worker in workers]
            else:
                first, share = sum(sizes[: workers.start]), sizes[workers.start : workers.stop]
                yield [PositionSpan(0, cursors[0] + first, sum(share))]
            cursors = self._after(cursors, sizes)

    def peek(self, sizes: Sequence[int]) -> Any:
        """Return all workers' examples of a step as one batch. Raises a DataError if others have own iterators."""
        data = self._data
        if isinstance(data, IterableData) and data.how.per_worker and len(sizes) > len(self.workers):
            raise DataError("each worker has an iterator of its own, which others cannot read. Pass a batch to check.")
        batches = self._start(self.cursors, tuple(sizes), range(len(sizes)))()
        return joined([batch for batch in batches if batch is not None])

    def indices(self, position: int, count: int, shard: int = 0) -> np.ndarray:
        """Return the indices of the examples at `count` positions of a shard, for data with an index."""
        assert isinstance(self._examples, Lookahead)
        return self._examples.order.examples(shard, position, count) + sum(self.lengths[:shard])

    def place(self) -> str:
        """Return the text that, with the cursors, is needed to resume here; "" for data with an index."""
        return self._examples.place(self.cursors)

    def go_on(self, cursors: Cursors, place: str) -> None:
        """Resume at the cursors of another stream of these data, for which `place()` returned this text."""
        self.go_back(cursors)
        self._examples.go_on(cursors, place)

    def go_back(self, cursors: Cursors) -> None:
        """Go back to earlier cursors of this stream."""
        self.cursors, self._ahead = cursors, None

    def close(self) -> None:
        """Close the data, reader processes and iterators included, without waiting for reads: one may hang."""
        if not self._closed:
            self._closed, self._ahead = True, None
            self._data.close()


class Lookahead:
    """A reader of the examples at positions of a stream, for data with an index, that reads ahead.

    What was read is kept by position, so that it stays usable when batch sizes change. Readers return the examples at
    some positions at a time, already stacked, so that this process only concatenates a few arrays.
    """

    def __init__(self, data: Rows, seed: int):
        self._data, self._shards, self._seed = data, data.shards, seed
        self.order = Order(data.lengths, seed)
        self._collector = ReaderThreads(1, 0)
        self._kept: dict[tuple[int, int], Row] = {}  # by shard and position

    def rows(self, shard: int, start: int, examples: int) -> Any:
        """Return the examples at positions of a shard in memory; `None` for no examples."""
        return self._shards[shard].rows(self.order.examples(shard, start, examples)) if examples else None

    def start(
        self, steps: Iterator[Sequence[PositionSpan]], committed: Sequence[int], end: Sequence[int]
    ) -> Callable[[], list[Any]]:
        """Start to read a step's spans, and those of later steps; see `IterableData.start`."""
        spans, readers = next(steps), self._data.readers.number
        self._kept = {at: k for at, k in self._kept.items() if at[1] >= committed[at[0]] and not _has_failed(k[0])}
        examples = max(1, sum(span.examples for span in spans))
        ahead = max(_STEPS_AHEAD, -(-2 * readers * self._shards[spans[0].shard].piece(examples) // examples))
        for step in (spans, *islice(steps, ahead if readers > 1 else 0)):
            for span in step:
                self._request(span)
        wanted = [(s, [self._kept[s.shard, s.start + k] for k in range(s.examples)]) for s in spans]
        wait = partial(self._batches, wanted)
        # What several readers have read is copied into one batch, in a thread beside the step.
        return wait if readers == 1 else partial(self._collector.result, self._collector.submit(wait))

    def _request(self, span: PositionSpan) -> None:
        """Start to read the span's examples that are neither kept nor being read."""
        indices, epochs, shard = self.order.examples(*span), self.order.epochs(*span), self._shards[span.shard]
        missing = [k for k in range(span.examples) if (span.shard, span.start + k) not in self._kept]
        size = shard.piece(span.examples)
        for start in range(0, len(missing), size):
            rows = missing[start : start + size]
            read = shard.submit(indices[rows], epochs[rows], self._seed, span.shard)
            self._kept |= {(span.shard, span.start + k): (read, row) for row, k in enumerate(rows)}

    def _batches(self, wanted: Sequence[tuple[PositionSpan, Sequence[Row]]]) -> list[Any]:
        """Wait for the examples of each span, and return them."""
        return [self._batch(span, rows) if rows else None for span, rows in wanted]

    def _batch(self, span: PositionSpan, rows: Sequence[Row]) -> Any:
        indices, parts, at, shard = self.order.examples(*span), [], 0, self._shards[span.shard]
        for read, group in groupby(rows, key=itemgetter(0)):
            numbers = [number for _, number in group]
            part = slice(numbers[0], numbers[-1] + 1)  # a read has consecutive rows for consecutive positions
            batch = shard.result(read, int(indices[at]))
            parts.append(jax.tree.map(lambda leaf, part=part: leaf[part], batch))
            at += len(numbers)
        return joined(parts)

    def place(self, cursors: Sequence[int]) -> str:
        """Return "": the cursors suffice."""
        return ""

    def go_on(self, cursors: Sequence[int], place: str) -> None:
        """Drop all reads, and cancel them."""
        kept, self._kept = self._kept, {}
        for read, _ in kept.values():
            read.cancel()


def _has_failed(read: Future[Any]) -> bool:
    return read.done() and (read.cancelled() or read.exception() is not None)


def open_data(data: Any, workers: int, mine: Sequence[int], world: World | None = None, seed: int = 0) -> Data:
    """Return a user's training data as rows or as iterators, for the workers `mine` of this process.

    The other processes of `world`, or of the current one, wait while this one reads. `seed`: of the random numbers of
    an iterator's examples. Raises a DataError for other data.
    """
    if isinstance(data, FromIterator):
        return IterableData(data, workers, mine, world, seed)
    if isinstance(data, Shards) and len(data.lengths) != workers:
        raise DataError(f"Shards of {len(data.lengths)} data sets for {workers} workers. Pass one for each worker.")
    rows = rows_of(data)
    for shard in rows.shards:
        shard.readers.world = world
    return rows
