"""Read the examples at positions of a stream, for data without an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .iterable import IterableData
from .one_example import stacked
from .random_access import Wanted


class SequentialReader:
    """A reader of the examples at positions of a stream, for iterators.

    Args:
      data: the iterators.
      seed: the seed of the examples' random numbers.
    """

    def __init__(self, data: IterableData, seed: int):
        self._data, self._seed = data, seed
        self._shared = not data.how.per_worker

    def steps_ahead(self, examples: int) -> int:
        """Return 0: prefetching is left to the iterator."""
        del examples
        return 0

    def read(self, wanted: Wanted) -> list[Any]:
        """Return a batch for each span; `None` for one without examples."""
        with self._data.reading():
            return self._read(wanted)

    def _read(self, wanted: Wanted) -> list[Any]:
        for shard, run in self._data.runs.items():
            run.release(wanted.committed[shard])
            if self._shared:  # read to the end of the step, so that all processes see the same ends of epochs
                run.reach(wanted.end[0] - 1)
                run.look_behind(wanted.end[0])
        batches = []
        for span in wanted.spans:
            run = self._data.runs[span.shard]
            run.reach(span.stop - 1)
            rows = [self._data.taken(run, span.shard, p, self._seed) for p in range(span.start, span.stop)]
            batches.append(stacked(rows) if rows else None)
        return batches

    def epochs(self, cursors: Sequence[int]) -> float:
        """Return the number of epochs consumed, as a fraction if their length is known. Replicated."""
        if self._data.epochs_are_unknown():
            return 0.0
        if self._data.how.length is not None:
            return sum(cursors) / self._data.length
        return self._data.runs[0].epochs(cursors[0])

    def epoch_length(self, cursors: Sequence[int]) -> int | None:
        """Return the number of examples of an epoch; None if unknown. Replicated."""
        if self._data.epochs_are_unknown():
            return None
        return self._data.length if self._data.how.length is not None else self._data.runs[0].epoch_length(cursors[0])

    def place(self, cursors: Sequence[int]) -> str:
        """Return the mark of a shared iterator as text, for `go_on`; "" for iterators per worker. Replicated."""
        return self._data.runs[0].place(cursors[0]) if self._shared else ""

    def go_on(self, cursors: Sequence[int], place: str) -> None:
        """Resume the iterators at the cursors."""
        for shard, run in self._data.runs.items():
            run.go_on(cursors[shard], place)
