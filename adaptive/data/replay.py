"""An iterator over epochs that keeps examples as long as they may be read again, and can resume at a position."""

from __future__ import annotations

import json
import logging
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from adaptive.base.errors import DataError
from adaptive.base.tree_paths import leaf_names

from .forks import warns_of_forks
from .iterator_states import set_state, state_of
from .one_example import arrays_of_batch
from .read_watch import CurrentReads

_log = logging.getLogger("adaptive")


class ResumePoint(NamedTuple):
    """A point from which an iterator can resume.

    Attributes:
      at: the position of the next example.
      epoch: number of epochs that ended before.
      began: the position at which this epoch began.
      state: the iterator's own state, as JSON; `None` if it has none.
    """

    at: int
    epoch: int
    began: int
    state: Any


class ReplayableIterator:
    """The examples of an iterator by position, kept until they are released.

    Args:
      begin: returns an epoch's iterator, or an iterable.
      batched: whether the iterator yields batches.
      length: number of examples of an epoch; `None` if unknown, `math.inf` if there are no epochs.
      reads: records each read.

    Attributes:
      next: the position of the next example to read.
    """

    def __init__(
        self,
        begin: Callable[[int], Iterable[Any]],
        batched: bool,
        length: float | None,
        reads: CurrentReads | None = None,
    ):
        self._begin, self._batched, self._length = begin, batched, length
        self._reads = reads or CurrentReads("of the iterator")
        self._restart(ResumePoint(0, 0, 0, None))

    def _restart(self, mark: ResumePoint) -> None:
        self.next = self._first = mark.at
        self._epoch, self._began = mark.epoch, mark.began
        self._base, self._ends = mark, list[int]()
        self._kept: deque[Any] = deque()  # from position `_first` on
        self._iterator: Iterator[Any] | None = None
        self._marks: deque[ResumePoint] = deque()
        self._mark_is_due = True
        self._error: Exception | None = None

    def reach(self, position: int) -> None:
        """Read until the example at a position is available."""
        self._mark_is_due = True
        while self.next <= position:
            if self._error is not None:
                raise self._error
            self._pull()

    def look_behind(self, position: int) -> None:
        """Read until it is known whether an epoch ends before this position. A later `reach` raises any error."""
        while self.next <= position and not (self.next == position and self._iterator is None and self._ends):
            if self._error is not None:
                return
            try:
                self._pull()
            except Exception:
                return

    def example(self, position: int) -> Any:
        """Return the example at a position that was reached and not released."""
        return self._kept[position - self._first]

    def release(self, position: int) -> None:
        """Drop the examples before a position; they must not be requested again."""
        while self._first < position and self._kept:
            self._kept.popleft()
            self._first += 1
        while len(self._marks) > 1 and self._marks[1].at <= position:
            self._marks.popleft()

    @warns_of_forks
    def _pull(self) -> None:
        try:
            if self._iterator is None:
                self._reads.begin(f"the start of epoch {self._epoch}")
                self._iterator = iter(self._begin(self._epoch))
            if self._mark_is_due or self.next == self._began:
                state = None if self.next == self._began else state_of(self._iterator)  # `begin` starts an epoch
                self._marks.append(ResumePoint(self.next, self._epoch, self._began, state))
                self._mark_is_due = False
            self._reads.begin(self.next)
            item = next(self._iterator)
        except StopIteration:
            self._end_epoch()
        except Exception as error:  # kept: a generator that has raised only stops, which must not end the epoch
            error.add_note(f"raised by the iterator at example {self.next}")
            self._error = error
            raise
        else:
            examples = _apart(item) if self._batched else [item]
            self._kept.extend(examples)
            self.next += len(examples)

    def _end_epoch(self) -> None:
        given = self.next - self._began
        if not given:
            again = ": does it return the same iterator each time, that has ended?" if self._epoch else "."
            self._error = DataError(f"the iterator of epoch {self._epoch} gave no examples{again}")
            raise self._error
        if self._length not in (None, math.inf, given):
            self._error = DataError(f"the iterator ended after {given} examples; length= says {self._length}.")
            raise self._error
        self._ends.append(self.next)
        self._epoch, self._began, self._iterator = self._epoch + 1, self.next, None

    # --- epochs -------------------------------------------------------------------------------------------------------

    def epochs(self, position: int) -> float:
        """Return the number of epochs before a position, with the fraction of its epoch if the length is known."""
        ended = bisect_right(self._ends, position)
        began = self._ends[ended - 1] if ended else self._base.began
        length = self.epoch_length(position)
        done = (position - began) / length if length else 0.0
        return self._base.epoch + ended + min(done, math.nextafter(1, 0))

    def epoch_length(self, position: int) -> int | None:
        """Return the number of examples of the last epoch that ended before a position; None if none has."""
        ended = bisect_right(self._ends, position)
        if not ended:
            return None
        return self._ends[ended - 1] - (self._ends[ended - 2] if ended > 1 else self._base.began)

    # --- resuming -----------------------------------------------------------------------------------------------------

    def place(self, position: int) -> str:
        """Return the last mark at or before a position as JSON, for `go_on`."""
        marks = [mark for mark in list(self._marks) if mark.at <= position]
        return json.dumps(marks[-1] if marks else self._base)

    def go_on(self, position: int, place: str) -> None:
        """Restart the iterator from a mark, and skip the examples before a position.

        Args:
          position: the position of the next example.
          place: the result of `place(position)`; "" to start at the beginning.
        """
        self.close()
        mark = ResumePoint(*json.loads(place)) if place else ResumePoint(0, 0, 0, None)
        self._restart(mark if mark.state is not None else mark._replace(at=mark.began))
        if mark.state is not None:
            try:
                self._set_state(mark)
            except Exception as error:
                _log.info("%s: %s. Its examples are read again, and skipped.", type(error).__name__, error)
                self._restart(mark._replace(at=mark.began))
        while self.next < position:
            self.reach(self.next)
            self.release(min(self.next, position))
        self.look_behind(position)

    def _set_state(self, mark: ResumePoint) -> None:
        self._reads.begin(f"the state, at position {mark.at},")
        iterator: Any = iter(self._begin(mark.epoch))
        set_state(iterator, mark.state)
        self._iterator = iterator

    def close(self) -> None:
        """Close the iterator."""
        iterator, self._iterator = self._iterator, None
        end = getattr(iterator, "close", None)
        if end is not None:
            end()


def _apart(batch: Any) -> list[Any]:
    """Split a batch into its examples.

    Raises:
      DataError: the leaves have no common leading axis, or are not arrays of numbers.
    """
    batch = arrays_of_batch(batch, "batch")
    leaves = jax.tree.leaves(batch)
    if len({leaf.shape[:1] for leaf in leaves}) == 1 and leaves[0].ndim:
        return [jax.tree.map(lambda leaf, i=i: leaf[i, ...], batch) for i in range(len(leaves[0]))]
    named = zip(leaf_names(batch, "batch"), leaves, strict=True)
    shapes = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in named)
    raise DataError(
        "batched=True, but the iterator yielded no batch. Its leaves have no common leading axis, with a row for "
        f"each example: {shapes or 'there are none'}. If these are examples, leave out batched=True."
    )
