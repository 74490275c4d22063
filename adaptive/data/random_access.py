"""Read the examples at positions of a stream, for data with an index.

Prefetched examples are kept by position, so that they stay usable when batch sizes change.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from .examples import Rows
from .order import Order
from .pool import ReadersLostError, chunk, result
from .reading import Passes, joined

_STEPS_AHEAD = 2  # steps to prefetch by reader processes; more if batches are too small to keep the processes busy


class PositionSpan(NamedTuple):
    """Positions of a shard that one worker takes in one step."""

    shard: int
    start: int
    examples: int

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.start + self.examples


class Wanted(NamedTuple):
    """The positions to read for one step.

    Attributes:
      spans: the span of each worker of this process.
      ahead: the spans of the following steps, if batch sizes stay the same.
      committed: the cursor of each shard; earlier positions are not read again.
      end: the cursor of each shard after the step.
    """

    spans: Sequence[PositionSpan]
    ahead: Sequence[PositionSpan]
    committed: Sequence[int]
    end: Sequence[int]


class RandomAccessReader:
    """A reader of the examples at positions of a stream, for data with an index.

    Args:
      rows: the data.
      seed: the seed of the order and of the examples' random numbers.
    """

    def __init__(self, rows: Rows, seed: int):
        self.data, self._seed = rows, seed
        self._starts = [shard.start for shard in rows.shard_ranges]
        self.order = Order([shard.length for shard in rows.shard_ranges], seed)
        self._kept: dict[
            tuple[int, int], tuple[Future[Any], int]
        ] = {}  # by shard and position: the piece with the example, and its index there

    def steps_ahead(self, examples: int) -> int:
        """Return the number of steps to prefetch if each has this many examples in this process."""
        num_readers = self.data.num_readers
        return max(_STEPS_AHEAD, -(-2 * num_readers // max(1, examples))) if num_readers else 0

    def indices(self, span: PositionSpan) -> np.ndarray:
        """Return the indices of a span's examples in the whole data set; shape=(span.examples,)."""
        found = self.order.examples(*span)
        start = self._starts[span.shard]
        return found + start if start else found

    def read(self, wanted: Wanted) -> list[Any]:
        """Return a batch for each span; `None` for one without examples. Starts to read the following steps."""
        if self.data.in_memory:
            return [self.data.rows(self.indices(span)) if span.examples else None for span in wanted.spans]
        self._forget(wanted)
        for span in (*wanted.spans, *wanted.ahead):
            self._request(span)
        return [self._gather(span) if span.examples else None for span in wanted.spans]

    def _request(self, span: PositionSpan) -> None:
        """Start to read the span's examples that are neither kept nor being read."""
        missing = [p for p in range(span.start, span.stop) if (span.shard, p) not in self._kept]
        size = chunk(span.examples, self.data.num_readers) if self.data.num_readers else span.examples
        first = 0
        for i in range(1, len(missing) + 1):
            if i == len(missing) or missing[i] != missing[i - 1] + 1 or i - first == size:
                self._submit(PositionSpan(span.shard, missing[first], i - first))
                first = i

    def _submit(self, span: PositionSpan) -> None:
        indices, passes = self.indices(span), Passes(self.order.epochs(*span), self._seed, span.shard)
        piece = self.data.submit(indices, passes)
        for offset in range(span.examples):
            self._kept[span.shard, span.start + offset] = (piece, offset)

    def _gather(self, span: PositionSpan) -> Any:
        """Assemble the span's batch from slices of the pieces that were read."""
        parts: list[tuple[Future[Any], int, int]] = []
        for position in range(span.start, span.stop):
            piece, offset = self._kept[span.shard, position]
            if parts and parts[-1][0] is piece and parts[-1][2] == offset:
                parts[-1] = (piece, parts[-1][1], offset + 1)
            else:
                parts.append((piece, offset, offset + 1))
        return joined([jax.tree.map(lambda a, i=i, j=j: a[i:j], self._result(piece)) for piece, i, j in parts])

    def _result(self, piece: Future[Any]) -> Any:
        try:
            return result(piece)
        except ReadersLostError:  # all reads in progress are lost
            self._kept = {}
            raise
        except Exception:  # drop the piece, so that a later request reads it again
            self._kept = {key: kept for key, kept in self._kept.items() if kept[0] is not piece}
            raise

    def _forget(self, wanted: Wanted) -> None:
        """Drop the examples that no step will need, and cancel their reads; keeps `_LEEWAY` positions beyond."""
        last = {span.shard: span.stop for span in (*wanted.spans, *wanted.ahead)}
        for span in (*wanted.spans, *wanted.ahead):
            last[span.shard] = max(last[span.shard], span.stop)
        kept, pieces = {}, set()
        for key, (piece, offset) in self._kept.items():
            if wanted.committed[key[0]] <= key[1] < last.get(key[0], 0) + _LEEWAY:
                kept[key] = (piece, offset)
                pieces.add(piece)
        for piece in {piece for piece, _ in self._kept.values()} - pieces:
            piece.cancel()
        self._kept = kept


_LEEWAY = 4096  # positions kept beyond the wanted ones, for sizes that shrink and grow again
