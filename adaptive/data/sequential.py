"""Examples at the positions of a stream, of data that are gone through in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .iterable import IterableData
from .one_example import stacked
from .random_access import Wanted


class SequentialReader:
    """Examples at positions.

    Args:
      data: the iterators.
      seed: of random numbers.
    """

    def __init__(self, data: IterableData, seed: int):
        self._data, self._seed = data, seed
        self._shared = not data.how.per_worker

    def steps_ahead(self, examples: int) -> int:
        """None: an iterator is as far ahead as its own workers are."""
        del examples
        return 0

    def read(self, wanted: Wanted) -> list[Any]:
        """A batch for each span; `None` for one without examples."""
        with self._data.reading():
            return self._read(wanted)

    def _read(self, wanted: Wanted) -> list[Any]:
        for shard, run in self._data.runs.items():
            run.release(wanted.committed[shard])
            if self._shared:  # so that all processes have seen the same ends of epochs
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
        """Epochs that have been taken, as a fraction where it is known how long they are. Replicated."""
        if self._data.epochs_are_unknown():
            return 0.0
        if self._data.how.length is not None:
            return sum(cursors) / self._data.length
        return self._data.runs[0].epochs(cursors[0])

    def epoch_length(self, cursors: Sequence[int]) -> int | None:
        """Examples of an epoch, if it is known. Replicated."""
        if self._data.epochs_are_unknown():
            return None
        return self._data.length if self._data.how.length is not None else self._data.runs[0].epoch_length(cursors[0])

    def place(self, cursors: Sequence[int]) -> str:
        """Where an iterator that all share stands, as text. Replicated."""
        return self._data.runs[0].place(cursors[0]) if self._shared else ""

    def go_on(self, cursors: Sequence[int], place: str) -> None:
        """Begin again at the cursors."""
        for shard, run in self._data.runs.items():
            run.go_on(cursors[shard], place)
