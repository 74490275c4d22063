"""Data without an index: the examples of an iterator, in its order.

Every process iterates over the same examples and takes its workers' share of each global batch, so the examples of a
step depend only on the global batches. Expensive work on single examples belongs in `map=` and `random_map=`, which are
called for a process's own share only. If even reading is too expensive, each worker can have its own iterator.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.errors import DataError
from adaptive.base.values.numbers import whole
from adaptive.base.values.tree_paths import leaf_names
from adaptive.base.world import World

from .advice import refuse_batches, refuse_foreign, refuse_spent
from .example import Functions, batch_of, first_taken
from .readers import ReaderThreads, begin_read
from .rows import Data, PositionSpan

_log = logging.getLogger("adaptive")
UNKNOWN_LENGTH = 2**31 - 1  # and the upper bound of a batch size
_KNOWN = ("epoch", "worker", "workers")  # parameters of the function of `from_iterator`


@dataclass(frozen=True, repr=False)
class FromIterator:
    """A function that makes an iterator, and how to read its examples. See `from_iterator`."""

    make: Callable[..., Iterable[Any]]
    names: frozenset[str]  # those of "epoch", "worker" and "workers" that are its parameters
    functions: Functions
    length: int | None
    read_timeout: float | None

    @property
    def per_worker(self) -> bool:
        """Whether each worker has its own iterator."""
        return "worker" in self.names

    def __repr__(self) -> str:
        return "data of an iterator" + " for each worker" * self.per_worker


def from_iterator(
    make: Callable[..., Iterable[Any]],
    *,
    map: Callable[[Any], Any] | None = None,
    random_map: Callable[[Any, np.random.Generator], Any] | None = None,
    length: int | None = None,
    read_timeout: float | None = None,
) -> FromIterator:
    """Return data without an index for `Program`: the examples of an iterator, in its order.

        def rows(epoch):
            yield from read("train.csv", seed=epoch)

        program = ad.Program(driver, state, ad.data.from_iterator(rows), global_batch=96)

    Every process iterates over the same examples in the same order and takes its workers' share of each global batch.
    Each example is thus in one batch per epoch, even if batch sizes or workers change. Nothing is shuffled. If `make`
    has a parameter `worker`, each worker has its own iterator instead, and advances in it by its own batch size.

    Checkpoints contain the iterator's state, if it has `get_state` and `set_state`, as grain's have; otherwise, and for
    iterators per worker, the earlier examples are read again and skipped.

    Args:
      make: a function that starts an epoch: returns an iterator or an iterable of examples. It is called with those of
        `epoch`, `worker` and `workers` that are its parameters.
      map: `fn(example)`, applied to each example of this process's share.
      random_map: `fn(example, rng)`, like `map`. The random numbers depend only on the program's seed and the position.
      length: examples in an epoch, over all workers, for options in epochs. By default known when the iterator ends.
      read_timeout: seconds after which reading one example, or starting an epoch, for a waiting step fails with a
        DataError; 0 for no limit. By default 1.5 times the world's `hang_timeout`, and no limit on one process.

    Raises:
      DataError: `make` is not a function, and the text has the line to write instead; or `length` is not a positive
        integer.
    """
    if length is not None and (whole(length) or 0) < 1:
        raise DataError(f"length={length!r}: write the number of examples in an epoch.")
    if hasattr(make, "__next__"):
        refuse_spent(make)
    if not callable(make):
        refuse_foreign(make)
        raise DataError(f"from_iterator takes a function that returns an iterator; got a {type(make).__name__}.")
    parameters = inspect.signature(make).parameters.values()
    names = frozenset(p.name for p in parameters if p.name in _KNOWN and p.kind != p.POSITIONAL_ONLY)
    ReaderThreads(1, read_timeout)  # raises
    return FromIterator(make, names, Functions(map, random_map), length, read_timeout)


class IterableData(Data):
    """Iterators in progress: one, or one for each worker of this process. Arguments as for `stream.open_data`."""

    def __init__(self, how: FromIterator, workers: int, mine: Sequence[int], world: World | None = None, seed: int = 0):
        self.how, self._workers, self._seed = how, workers, seed
        self._thread = ReaderThreads(1, how.read_timeout)  # of all reads: some iterators cannot be used by two threads
        self._thread.world = world
        length = None if how.per_worker else how.length
        shards = list(mine) or [0] if how.per_worker else [0]
        self._runs = {shard: ReplayableIterator(partial(self._begin, shard), length) for shard in shards}
        self.example = self._thread.call(self._read_first, shards[0])
        self._length = int(how.length) if how.length is not None else UNKNOWN_LENGTH
        self.lengths = (self._length,) * (workers if how.per_worker else 1)
        if how.per_worker and how.length is None:
            self.no_epochs = "each worker has its own iterator, and the lengths of all are not known"
        named = zip(leaf_names(self.example, "example"), jax.tree.leaves(self.example), strict=True)
        leaves = ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in named)
        self.notes = _PROMISE_OF_EACH if how.per_worker else _PROMISE, f"of the iterator, one example is {leaves}"

    def _begin(self, shard: int, epoch: int) -> Iterable[Any]:
        """Start an epoch of a worker's iterator, or of the one that all share."""
        known = {"epoch": epoch, "worker": shard, "workers": self._workers}
        made = self.how.make(**{name: known[name] for name in self.how.names})
        refuse_batches(made)
        return made

    def _read_first(self, shard: int) -> Any:
        self._runs[shard].reach(0)
        return first_taken(self._item(shard, 0), "example 0")

    def _item(self, shard: int, position: int) -> Any:
        try:
            return self._runs[shard].transformed(
                position, lambda item: self.how.functions.applied(item, position, 0, self._seed, shard)
            )
        except Exception as error:
            error.add_note(f"in example {position} of the iterator")
            raise

    def _batch(self, span: PositionSpan) -> Any:
        """Return the examples of a span, transformed, on the host; `None` if there are none."""
        stop = span.start + span.examples
        self._runs[span.shard].reach(stop - 1)
        numbers = range(span.start, stop)
        items = [self._item(span.shard, position) for position in numbers]
        return batch_of(items, numbers, self.example) if items else None

    def first_batch(self, examples: int) -> Any:
        """Return the first examples, by which processes are compared, as a batch."""
        return self._thread.call(self._batch, PositionSpan(min(self._runs), 0, examples))

    def start(
        self, steps: Iterator[Sequence[PositionSpan]], committed: Sequence[int], end: Sequence[int]
    ) -> Callable[[], list[Any]]:
        """Start to read a step's spans. Returns a function that waits for their batches; `None` for an empty span.

        Positions before the cursors `committed` are not read again; `end` are the cursors after the step.
        """
        return partial(self._thread.result, self._thread.submit(self._read, next(steps), committed, end))

    def _read(self, spans: Sequence[PositionSpan], committed: Sequence[int], end: Sequence[int]) -> list[Any]:
        for shard, run in self._runs.items():
            run.release(committed[shard])
            if not self.how.per_worker:  # read to the step's end, so that all processes see the same ends of epochs
                run.reach(end[0] - 1)
                run.look_behind(end[0])
        return [self._batch(span) for span in spans]

    def __len__(self) -> int:
        return self._length

    def epochs(self, cursors: Sequence[int]) -> tuple[float, int | None]:
        if self.no_epochs:
            return 0.0, None
        return super().epochs(cursors) if self.how.length is not None else self._runs[0].epochs(cursors[0])

    def place(self, cursors: Sequence[int]) -> str:
        """Return the text that is needed to resume at the cursors, or "". Local."""
        return "" if self.how.per_worker else self._runs[0].place(cursors[0])

    def go_on(self, cursors: Sequence[int], place: str) -> None:
        """Resume at the cursors."""
        for shard, run in self._runs.items():
            self._thread.call(run.go_on, cursors[shard], place)

    def close(self) -> None:
        for run in self._runs.values():
            self._thread.submit(run.close)


_PROMISE = (
    "data without an index, in the order of their iterator: every process reads all examples and takes its share of "
    "each global batch, so each is taken once per pass, if the iterator is the same on all processes."
)
_PROMISE_OF_EACH = "data of an iterator of each worker's own: the rest of a leaving worker's data leaves with it."


class ResumePoint(NamedTuple):
    """A point from which an iterator can resume."""

    at: int = 0  # the position of the next example
    epoch: int = 0  # number of epochs that ended before
    began: int = 0  # the position at which this epoch began
    state: Any = None  # of the iterator, as JSON; `None` to start the epoch and skip examples
    length: int | None = None  # of the last epoch that ended; `None` before the first has


class ReplayableIterator:
    """The examples of an iterator by position, kept until they are released. `begin(epoch)` starts an epoch."""

    def __init__(self, begin: Callable[[int], Iterable[Any]], length: int | None):
        self._begin, self._length = begin, length
        self._restart(ResumePoint())

    def _restart(self, point: ResumePoint) -> None:
        self.next = point.at  # the position of the next example to read
        self._kept: deque[tuple[Any, bool]] = deque()  # the examples before it, and whether they are transformed
        self._points = deque([point])  # the last one is of the epoch that is being read
        self._iterator: Iterator[Any] | None = None
        self._error: Exception | None = None

    def reach(self, position: int) -> None:
        """Read until the example at a position is available."""
        if self._iterator is not None and self.next <= position:
            self._points.append(self._points[-1]._replace(at=self.next, state=_state_of(self._iterator)))
        while self.next <= position:
            self._pull()

    def look_behind(self, position: int) -> None:
        """Read until it is known whether an epoch ends before this position. A later `reach` raises any error."""
        while self.next <= position and not (self._points[-1].began == position and self._points[-1].length):
            try:
                self._pull()
            except Exception:
                return

    def transformed(self, position: int, function: Callable[[Any], Any]) -> Any:
        """Return the result of a function of the example at a position that was reached and not released. Call the
        function once for each example, because it may change the example in place.
        """
        item, done = self._kept[position - self.next]
        if not done:
            item = function(item)
            self._kept[position - self.next] = item, True
        return item

    def release(self, position: int) -> None:
        """Drop the examples before a position; they must not be requested again."""
        while self._kept and self.next - len(self._kept) < position:
            self._kept.popleft()
        while len(self._points) > 1 and self._points[1].at <= position:
            self._points.popleft()

    def _pull(self) -> None:
        """Read one example, or the end of an epoch."""
        if self._error is not None:  # a generator that has raised only stops, which must not end the epoch
            raise self._error
        try:
            if self._iterator is None:
                epoch = self._points[-1].epoch
                begin_read(f"the start of epoch {epoch} of the iterator")
                self._iterator = iter(self._begin(epoch))
            begin_read(f"example {self.next} of the iterator")
            self._kept.append((next(self._iterator), False))
            self.next += 1
        except StopIteration:
            self._end_epoch()
        except Exception as error:
            error.add_note(f"raised by the iterator at example {self.next}")
            self._error = error
            raise

    def _end_epoch(self) -> None:
        point = self._points[-1]
        given = self.next - point.began
        if not given:
            again = ": does it return the same iterator each time, that has ended?" if point.epoch else "."
            self._error = DataError(f"the iterator of epoch {point.epoch} gave no examples{again}")
            raise self._error
        if self._length not in (None, given):
            self._error = DataError(f"the iterator ended after {given} examples; length= says {self._length}.")
            raise self._error
        self._points.append(ResumePoint(self.next, point.epoch + 1, self.next, None, given))
        self._iterator = None

    def epochs(self, position: int) -> tuple[float, int | None]:
        """Return the epochs before a position, as a fraction if possible, and the length of the last that ended."""
        point = self._point(position)
        done = (position - point.began) / point.length if point.length else 0.0
        return point.epoch + min(done, math.nextafter(1, 0)), point.length

    def _point(self, position: int) -> ResumePoint:
        """Return the last resume point at or before a position."""
        return [point for point in list(self._points) if point.at <= position][-1]

    def place(self, position: int) -> str:
        """Return the last resume point at or before a position as JSON, for `go_on`."""
        return json.dumps(self._point(position))

    def go_on(self, position: int, place: str) -> None:
        """Restart the iterator from a result of `place(position)`, or "", and skip the examples before the position."""
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
        return {"bytes": state.decode("latin-1")}
    try:
        return None if state is None else {"json": json.loads(json.dumps(state))}
    except TypeError:
        return None


def _decoded(state: dict[str, Any]) -> Any:
    return state["json"] if "json" in state else state["bytes"].encode("latin-1")
