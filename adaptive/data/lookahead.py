"""Read the examples at positions of a stream, for data with an index, and read ahead.

Examples that were read are kept by position, so that they stay usable when batch sizes change.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from .example import stacked
from .order import Order
from .rows import Passes, Rows

_STEPS_AHEAD = 2  # for several readers; more if batches are too small to keep them busy
_LEEWAY = 4096  # positions kept beyond the wanted ones, for sizes that shrink and grow again


class PositionSpan(NamedTuple):
    """Positions of a shard that one worker takes in one step."""

    shard: int
    start: int
    examples: int

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.start + self.examples


class Lookahead:
    """A reader of the examples at positions of a stream.

    Args:
      data: the data.
      seed: the seed of the order and of the examples' random numbers.
    """

    def __init__(self, data: Rows, seed: int):
        self._data, self._seed = data, seed
        self._starts = [shard.start for shard in data.shard_ranges]
        self.order = Order([shard.length for shard in data.shard_ranges], seed)
        # By shard and position: the read, the example's place in it, and its index in the data.
        self._kept: dict[tuple[int, int], tuple[Future[Any], int, int]] = {}

    def steps_ahead(self, examples: int) -> int:
        """Return the number of steps to read ahead if each has this many examples in this process."""
        readers = self._data.readers
        return max(_STEPS_AHEAD, -(-2 * readers // max(1, examples))) if readers else 0

    def indices(self, span: PositionSpan) -> np.ndarray:
        """Return the indices of a span's examples in the whole data set; shape=(span.examples,)."""
        found = self.order.examples(*span)
        start = self._starts[span.shard]
        return found + start if start else found

    def read(self, spans: Sequence[PositionSpan], ahead: Sequence[PositionSpan], committed: Sequence[int]) -> list[Any]:
        """Return a batch for each span; `None` for one without examples. Starts to read the spans of later steps.

        Args:
          spans: the span of each worker of this process.
          ahead: the spans of the following steps, if batch sizes stay the same.
          committed: the cursor of each shard; earlier positions are not read again.
        """
        if self._data.by_row:
            return [self._data.rows(self.indices(span)) if span.examples else None for span in spans]
        self._forget([*spans, *ahead], committed)
        for span in (*spans, *ahead):
            self._request(span)
        return [stacked(self._examples(span)) if span.examples else None for span in spans]

    def _request(self, span: PositionSpan) -> None:
        """Start to read the span's examples that are neither kept nor being read."""
        missing = [p for p in range(span.start, span.stop) if (span.shard, p) not in self._kept]
        if not missing:
            return
        where = np.array(missing) - span.start
        indices, epochs = self.indices(span)[where], self.order.epochs(*span)[where]
        size = self._data.chunk(span.examples)
        for first in range(0, len(missing), size):
            part = slice(first, first + size)
            read = self._data.submit(indices[part], Passes(epochs[part], self._seed, span.shard))
            for place, (position, index) in enumerate(zip(missing[part], indices[part].tolist(), strict=True)):
                self._kept[span.shard, position] = read, place, index

    def _examples(self, span: PositionSpan) -> list[Any]:
        found = []
        for position in range(span.start, span.stop):
            read, place, index = self._kept[span.shard, position]
            try:
                found.append(self._data.result(read, index)[place])
            except Exception:  # keep what was read, so that the step reads the rest again when it is repeated
                self._kept = {key: kept for key, kept in self._kept.items() if _has_succeeded(kept[0])}
                raise
        return found

    def _forget(self, wanted: Sequence[PositionSpan], committed: Sequence[int]) -> None:
        """Drop the examples that no step will need, and cancel their reads; keeps `_LEEWAY` positions beyond."""
        last: dict[int, int] = {}
        for span in wanted:
            last[span.shard] = max(last.get(span.shard, 0), span.stop)
        kept = {
            (shard, position): found
            for (shard, position), found in self._kept.items()
            if committed[shard] <= position < last.get(shard, 0) + _LEEWAY
        }
        needed = {id(read) for read, _, _ in kept.values()}
        for read, _, _ in self._kept.values():
            if id(read) not in needed:
                read.cancel()
        self._kept = kept


def _has_succeeded(read: Future[Any]) -> bool:
    return read.done() and not read.cancelled() and read.exception() is None
