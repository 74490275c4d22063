"""An iterator over epochs that keeps examples as long as they may be read again, and can resume at a position."""

from __future__ import annotations

import base64
import json
import logging
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from adaptive.base.errors import DataError

from .fetch_thread import begin_read

_log = logging.getLogger("adaptive")


class ResumePoint(NamedTuple):
    """A point from which an iterator can resume.

    Attributes:
      at: the position of the next example.
      epoch: number of epochs that ended before.
      began: the position at which this epoch began.
      state: what the iterator's `get_state` returned, as JSON; `None` to start the epoch and skip examples.
    """

    at: int = 0
    epoch: int = 0
    began: int = 0
    state: Any = None


class ReplayableIterator:
    """The examples of an iterator by position, kept until they are released.

    Args:
      begin: returns an epoch's iterator, or an iterable.
      length: number of examples of an epoch; `None` if unknown, `math.inf` if there are no epochs.

    Attributes:
      next: the position of the next example to read.
    """

    def __init__(self, begin: Callable[[int], Iterable[Any]], length: float | None):
        self._begin, self._length = begin, length
        self._restart(ResumePoint())

    def _restart(self, point: ResumePoint) -> None:
        self.next = self._first = point.at
        self._kept: deque[Any] = deque()  # from position `_first` on
        # Where epochs begin, from number `_epoch_before` + 1 on; the last of them has not ended.
        self._begins, self._epochs_before = [point.began], point.epoch
        self._points = deque([point])
        self._iterator: Iterator[Any] | None = None
        self._error: Exception | None = None

    def reach(self, position: int) -> None:
        """Read until the example at a position is available."""
        if self._iterator is not None and self.next <= position:
            point = ResumePoint(self.next, self._epoch, self._begins[-1], _state_of(self._iterator))
            self._points.append(point)
        while self.next <= position:
            self._pull()

    def look_behind(self, position: int) -> None:
        """Read until it is known whether an epoch ends before this position. A later `reach` raises any error."""
        while self.next <= position and not (self.next == position == self._begins[-1] and len(self._begins) > 1):
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
        while len(self._points) > 1 and self._points[1].at <= position:
            self._points.popleft()

    @property
    def _epoch(self) -> int:
        return self._epochs_before + len(self._begins) - 1

    def _pull(self) -> None:
        """Read one example, or the end of an epoch."""
        if self._error is not None:  # a generator that has raised only stops, which must not end the epoch
            raise self._error
        try:
            if self._iterator is None:
                begin_read(f"the start of epoch {self._epoch} of the iterator")
                self._iterator = iter(self._begin(self._epoch))
            begin_read(f"example {self.next} of the iterator")
            self._kept.append(next(self._iterator))
            self.next += 1
        except StopIteration:
            self._end_epoch()
        except Exception as error:
            error.add_note(f"raised by the iterator at example {self.next}")
            self._error = error
            raise

    def _end_epoch(self) -> None:
        given = self.next - self._begins[-1]
        if not given:
            again = ": does it return the same iterator each time, that has ended?" if self._epoch else "."
            self._error = DataError(f"the iterator of epoch {self._epoch} gave no examples{again}")
            raise self._error
        if self._length not in (None, math.inf, given):
            self._error = DataError(f"the iterator ended after {given} examples; length= says {self._length}.")
            raise self._error
        self._begins.append(self.next)
        self._points.append(ResumePoint(self.next, self._epoch, self.next))
        self._iterator = None

    # --- epochs -------------------------------------------------------------------------------------------------------

    def epochs(self, position: int) -> float:
        """Return the number of epochs before a position, with the fraction of its epoch if the length is known."""
        number = bisect_right(self._begins, position) - 1
        length = self.epoch_length(position)
        done = (position - self._begins[number]) / length if length else 0.0
        return self._epochs_before + number + min(done, math.nextafter(1, 0))

    def epoch_length(self, position: int) -> int | None:
        """Return the number of examples of the last epoch that ended before a position; `None` if none has."""
        number = bisect_right(self._begins, position) - 1
        return self._begins[number] - self._begins[number - 1] if number > 0 else None

    # --- resuming -----------------------------------------------------------------------------------------------------

    def place(self, position: int) -> str:
        """Return the last resume point at or before a position as JSON, for `go_on`."""
        return json.dumps([point for point in list(self._points) if point.at <= position][-1])

    def go_on(self, position: int, place: str) -> None:
        """Restart the iterator from a resume point, and skip the examples before a position.

        Args:
          position: the position of the next example.
          place: the result of `place(position)`; "" to start at the beginning.
        """
        self.close()
        point = ResumePoint(*json.loads(place)) if place else ResumePoint()
        self._restart(point._replace(at=point.began, state=None))
        if point.state is not None:
            try:
                begin_read(f"the state of the iterator at position {point.at}")
                iterator: Any = iter(self._begin(point.epoch))
                iterator.set_state(_decoded(point.state))
                self._restart(point)
                self._iterator = iterator
            except Exception as error:
                _log.info("%s: %s. Its examples are read again, and skipped.", type(error).__name__, error)
        while self.next < position:
            self._pull()
            self.release(min(self.next, position))
        self.look_behind(position)

    def close(self) -> None:
        """Close the iterator."""
        iterator, self._iterator = self._iterator, None
        end = getattr(iterator, "close", None)
        if end is not None:
            end()


def _state_of(iterator: Any) -> Any:
    """Return the state of an iterator for `set_state`, as JSON; `None` if it has none that is JSON or bytes.

    Only `get_state`, grain's method, promises the same examples afterwards. The `state_dict` of Hugging Face's data
    sets loses the examples in a shuffle buffer.
    """
    state = getattr(iterator, "get_state", lambda: None)()
    if isinstance(state, bytes):
        return {"bytes": base64.b64encode(state).decode()}
    try:
        return None if state is None else {"json": json.loads(json.dumps(state))}
    except TypeError:
        return None


def _decoded(state: dict[str, Any]) -> Any:
    return state["json"] if "json" in state else base64.b64decode(state["bytes"])
