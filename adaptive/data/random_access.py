"""Examples at the positions of a stream, of data that have an index.

What is fetched ahead is kept by position: sizes may change, and what is there or under way is dealt out anew.
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

_STEPS_AHEAD = 2  # that are requested of other processes, and more where batches are too small to occupy them


class Span(NamedTuple):
    """Positions of a shard that one worker takes in one step."""

    shard: int
    start: int
    examples: int

    @property
    def stop(self) -> int:
        """The position behind the last."""
        return self.start + self.examples


class Wanted(NamedTuple):
    """What is to be fetched for one step.

    Attributes:
      spans: of each worker.
      ahead: what those that follow will take if nothing is resized.
      committed: the cursor of each shard: what lies before it is not asked for again.
      end: where the cursors are after the step.
    """

    spans: Sequence[Span]
    ahead: Sequence[Span]
    committed: Sequence[int]
    end: Sequence[int]


class RandomAccessReader:
    """Examples at positions.

    Args:
      rows: the data.
      seed: of their order and their random numbers.
    """

    def __init__(self, rows: Rows, seed: int):
        self.data, self._seed = rows, seed
        self._starts = [shard.start for shard in rows.shard_ranges]
        self.order = Order([shard.length for shard in rows.shard_ranges], seed)
        self._kept: dict[
            tuple[int, int], tuple[Future[Any], int]
        ] = {}  # by shard and position: in which piece, and where

    def steps_ahead(self, examples: int) -> int:
        """How many steps of so many examples, in this process, are to be requested beyond the one that is fetched."""
        num_readers = self.data.num_readers
        return max(_STEPS_AHEAD, -(-2 * num_readers // max(1, examples))) if num_readers else 0

    def indices(self, span: Span) -> np.ndarray:
        """Which examples stand there."""
        found = self.order.examples(*span)
        start = self._starts[span.shard]
        return found + start if start else found

    def read(self, wanted: Wanted) -> list[Any]:
        """A batch for each span; `None` for one without examples."""
        if self.data.in_memory:
            return [self.data.rows(self.indices(span)) if span.examples else None for span in wanted.spans]
        self._forget(wanted)
        for span in (*wanted.spans, *wanted.ahead):
            self._request(span)
        return [self._gather(span) if span.examples else None for span in wanted.spans]

    def _request(self, span: Span) -> None:
        """Begin to fetch what is not there yet."""
        missing = [p for p in range(span.start, span.stop) if (span.shard, p) not in self._kept]
        size = chunk(span.examples, self.data.num_readers) if self.data.num_readers else span.examples
        first = 0
        for i in range(1, len(missing) + 1):
            if i == len(missing) or missing[i] != missing[i - 1] + 1 or i - first == size:
                self._submit(Span(span.shard, missing[first], i - first))
                first = i

    def _submit(self, span: Span) -> None:
        indices, passes = self.indices(span), Passes(self.order.epochs(*span), self._seed, span.shard)
        piece = self.data.submit(indices, passes)
        for offset in range(span.examples):
            self._kept[span.shard, span.start + offset] = (piece, offset)

    def _gather(self, span: Span) -> Any:
        """The batch, of slices of pieces."""
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
        except ReadersLostError:  # and all that was under way
            self._kept = {}
            raise
        except Exception:  # so that whoever asks again has it read again
            self._kept = {key: kept for key, kept in self._kept.items() if kept[0] is not piece}
            raise

    def _forget(self, wanted: Wanted) -> None:
        """What no step will take, as far as can be told."""
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


_LEEWAY = 4096  # positions behind what is wanted: sizes that shrink and grow again find what they had
