"""Read the examples at positions of a stream, for data with an index, and read ahead.

What was read is kept by position, so that it stays usable when batch sizes change. Readers return *pieces*: the
examples at consecutive positions, already stacked, so that this process only concatenates a few arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, islice
from typing import Any, NamedTuple

import jax
import numpy as np

from .example import joined
from .order import Order
from .rows import ReadRequest, Rows

_STEPS_AHEAD = 2  # for several readers; more if batches are too small to keep them busy


class PositionSpan(NamedTuple):
    """Positions of a shard that one worker takes in one step."""

    shard: int
    start: int
    examples: int

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.start + self.examples


class Piece(NamedTuple):
    """A read of the examples at positions `start` … `stop - 1` of a shard.

    Attributes:
      read: returns the examples as one batch.
      example: the first example's index in the data.
    """

    start: int
    stop: int
    read: Future[Any]
    example: int


class Lookahead:
    """A reader of the examples at positions of a stream.

    Args:
      data: the data.
      seed: the seed of the order and of the examples' random numbers.
    """

    def __init__(self, data: Rows, seed: int):
        self._data, self._seed = data, seed
        self.order = Order([shard.length for shard in data.shard_ranges], seed)
        self._kept: dict[int, list[Piece]] = {}  # by shard, in the order of positions; pieces do not overlap

    def indices(self, span: PositionSpan) -> np.ndarray:
        """Return the indices of a span's examples in the whole data set; shape=(span.examples,)."""
        found, start = self.order.examples(*span), self._data.shard_ranges[span.shard].start
        return found + start if start else found

    def read(
        self,
        spans: Sequence[PositionSpan],
        later: Iterator[Sequence[PositionSpan]],
        committed: Sequence[int],
    ) -> list[Any]:
        """Return a batch for each span; `None` for one without examples. Starts to read the spans of later steps.

        Args:
          spans: the span of each worker of this process.
          later: those of the following steps, if batch sizes stay the same.
          committed: the cursor of each shard; earlier positions are not read again.
        """
        if self._data.by_row:
            return [self._data.rows(self.indices(span)) if span.examples else None for span in spans]
        self._forget(lambda shard, piece: piece.stop <= committed[shard])
        for span in spans:
            self._request(span)
        readers, examples = self._data.readers, sum(span.examples for span in spans)
        steps = max(_STEPS_AHEAD, -(-2 * readers // max(1, examples))) if readers else 0
        for span in chain.from_iterable(islice(later, steps)):
            self._request(span)
        return [self._batch(span) if span.examples else None for span in spans]

    def _request(self, span: PositionSpan) -> None:
        """Start to read the span's examples that are neither kept nor being read."""
        pieces = self._kept.setdefault(span.shard, [])
        size = self._data.piece(span.examples)
        for start, stop in list(_gaps(span, pieces)):
            for first in range(start, stop, size):
                part = PositionSpan(span.shard, first, min(size, stop - first))
                indices = self.indices(part)
                read = self._data.submit(ReadRequest(indices, self.order.epochs(*part), self._seed, span.shard))
                pieces.append(Piece(first, part.stop, read, int(indices[0])))
        pieces.sort(key=lambda piece: piece.start)

    def _batch(self, span: PositionSpan) -> Any:
        """Wait for the pieces of a span, and return its batch."""
        parts = []
        for piece in self._kept[span.shard]:
            if piece.start < span.stop and span.start < piece.stop:
                try:
                    batch = self._data.result(piece.read, piece.example)
                except Exception:  # keep what was read, so that the step reads the rest again when it is repeated
                    self._forget(lambda _, each: not _has_succeeded(each.read))
                    raise
                rows = slice(max(span.start - piece.start, 0), span.stop - piece.start)
                parts.append(jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch))
        return joined(parts)

    def _forget(self, unneeded: Callable[[int, Piece], bool]) -> None:
        """Drop pieces, and cancel their reads."""
        for shard, pieces in self._kept.items():
            for piece in pieces:
                if unneeded(shard, piece):
                    piece.read.cancel()
            self._kept[shard] = [piece for piece in pieces if not unneeded(shard, piece)]

    def forget_all(self) -> None:
        """Drop all pieces: the stream continues elsewhere. Called in the data's thread."""
        self._forget(lambda *_: True)


def _gaps(span: PositionSpan, pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each part of a span that no piece holds."""
    start = span.start
    for piece in pieces:
        if piece.stop > start and piece.start < span.stop:
            if piece.start > start:
                yield start, piece.start
            start = piece.stop
    if start < span.stop:
        yield start, span.stop


def _has_succeeded(read: Future[Any]) -> bool:
    return read.done() and not read.cancelled() and read.exception() is None
