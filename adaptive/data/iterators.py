"""Data without an index: the examples of an iterator, in its order.

Every process iterates over the same examples and takes its workers' share of each global batch. Each process therefore
reads all examples, and the examples of a step depend only on the global batches, even if batch sizes or workers change.
Expensive work on single examples, such as decoding and augmentation, belongs in `map=` and `random_map=`, which are
called for a process's own share only. If even reading is too expensive, each worker can have its own iterator.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import DataError
from adaptive.base.numbers import whole
from adaptive.base.tree_paths import leaf_names
from adaptive.base.world import World

from .advice import refuse_batches, refuse_foreign, refuse_spent
from .example import checked, first_taken, random_numbers, stacked, taken
from .fetch_thread import FetchThread, checked_timeout
from .lookahead import PositionSpan
from .replay import ReplayableIterator
from .rows import Data, ShardRange

_MANY = 2**31 - 1  # upper bound of a batch size, if the number of examples is unknown
_KNOWN = ("epoch", "worker", "workers")  # parameters of the function of `from_iterator`


@dataclass(frozen=True, repr=False)
class FromIterator:
    """A function that makes an iterator, and how to read its examples. See `from_iterator`.

    Attributes:
      make: the function that starts an epoch.
      names: those of "epoch", "worker" and "workers" that are parameters of `make`.
      transform: function of an example, or `None`.
      augment: function of an example and its random generator, or `None`.
      length: number of examples in an epoch; `None` if unknown, `math.inf` if there are no epochs.
      read_timeout: seconds after which reading one example fails; `None` for the default, 0 for no limit.
    """

    make: Callable[..., Iterable[Any]]
    names: frozenset[str]
    transform: Callable[[Any], Any] | None = None
    augment: Callable[[Any, np.random.Generator], Any] | None = None
    length: float | None = None
    read_timeout: float | None = None

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
    length: float | None = None,
    read_timeout: float | None = None,
) -> FromIterator:
    """Return data without an index for `Program`: the examples of an iterator, in its order.

        def rows(epoch):
            yield from read("train.csv", seed=epoch)

        program = ad.Program(driver, state, ad.data.from_iterator(rows), global_batch=96)

    Every process iterates over the same examples in the same order and takes its workers' share of each global batch.
    Each example is thus in one batch per epoch, even if batch sizes or workers change, but each process reads all
    examples. Nothing is shuffled. If `make` has a parameter `worker`, each worker has its own iterator instead, and
    advances in it by its own batch size.

    Checkpoints contain the iterator's state, if it has `get_state` and `set_state`, as grain's have; otherwise the
    epoch's earlier examples are read again and skipped. For iterators per worker, checkpoints contain the number of
    examples that each has yielded, which are skipped.

    Args:
      make: a function that starts an epoch: returns an iterator or an iterable of examples. It is called with those of
        `epoch`, `worker` and `workers` that are its parameters.
      map: `fn(example)`, applied to each example of this process's share.
      random_map: `fn(example, rng)`, like `map` with random numbers, which depend only on the program's seed and the
        example's position in the stream.
      length: number of examples in an epoch, over all workers, for options in epochs. By default an epoch ends when the
        iterator ends; with `math.inf` there are no epochs.
      read_timeout: seconds after which reading one example, or starting an epoch, for a waiting step fails with a
        DataError; 0 for no limit. By default 1.5 times the world's `hang_timeout`, and no limit on one process.

    Raises:
      DataError: `make` is not a function, or has other parameters; says the line to write instead.
    """
    if length is not None and length != math.inf:
        length = whole(length)
        if length is None or length < 1:
            raise DataError("length= must be the number of examples in an epoch, or math.inf for data without epochs.")
    if hasattr(make, "__next__"):
        refuse_spent(make)
    if not callable(make):
        refuse_foreign(make)
        raise DataError(f"from_iterator takes a function that returns an iterator; got a {type(make).__name__}.")
    parameters = inspect.signature(make).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    unknown = [p.name for p in parameters if p.name not in _KNOWN and p.default is p.empty and p.kind not in kinds]
    if unknown:
        raise DataError(
            f"the function of from_iterator may have the parameters {', '.join(_KNOWN)}; this one also has "
            f"{', '.join(unknown)}. Bind them:  lambda epoch: rows(…)"
        )
    names = frozenset(p.name for p in parameters if p.name in _KNOWN and p.kind != p.POSITIONAL_ONLY)
    read_timeout = checked_timeout(read_timeout)
    return FromIterator(make, names, map, random_map, length, read_timeout)


class IterableData(Data):
    """Iterators in progress: one, or one for each worker of this process.

    Args:
      how: makes the iterators.
      workers: number of workers of all processes.
      mine: the workers of this process.
      world: the world whose other processes wait while this one reads; `None` for the current one.

    Attributes:
      seed: the seed of the examples' random numbers.

    Raises:
      DataError: an iterator yields no examples, or unusable ones; or a read takes too long.
    """

    seed = 0

    def __init__(self, how: FromIterator, workers: int, mine: Sequence[int], world: World | None = None):
        self.how, self._workers = how, workers
        self.thread = FetchThread(how.read_timeout)  # of all reads: some iterators cannot be used by two threads
        self.thread.world = world
        length = None if how.per_worker else how.length
        shards = list(mine) or [0] if how.per_worker else [0]
        self._runs = {shard: ReplayableIterator(partial(self._begin, shard), length) for shard in shards}
        self.example: Any = None
        self.thread.call(self._read_first, shards[0])
        examples = int(how.length) if how.length is not None and how.length != math.inf else _MANY
        self.shard_ranges = (ShardRange(0, examples),) * (workers if how.per_worker else 1)

    def _begin(self, shard: int, epoch: int) -> Iterable[Any]:
        """Start an epoch of a worker's iterator, or of the one that all share."""
        known = {"epoch": epoch, "worker": shard, "workers": self._workers}
        made = self.how.make(**{name: known[name] for name in self.how.names})
        refuse_batches(made)
        return made

    def _read_first(self, shard: int) -> None:
        self._runs[shard].reach(0)
        self.example = first_taken(self._item(shard, 0), "example 0")
        named = zip(leaf_names(self.example, "example"), jax.tree.leaves(self.example), strict=True)
        leaves = ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in named)
        self.notes = _PROMISE_OF_EACH if self.how.per_worker else _PROMISE, f"of the iterator, one example is {leaves}"

    def _item(self, shard: int, position: int) -> Any:
        item = self._runs[shard].example(position)
        try:
            if self.how.transform is not None:
                item = self.how.transform(item)
            if self.how.augment is not None:
                item = self.how.augment(item, random_numbers(position, 0, self.seed, shard))
        except Exception as error:
            error.add_note(f"in example {position} of the iterator")
            raise
        return item

    def _batch(self, shard: int, start: int, stop: int) -> Any:
        """Return the examples at these positions, transformed, on the host; `None` if there are none."""
        self._runs[shard].reach(stop - 1)
        rows = []
        for position in range(start, stop):
            name = f"example {position}"
            rows.append(checked(taken(self._item(shard, position), name), self.example, name))
        return stacked(rows) if rows else None

    def first_batch(self, examples: int) -> Any:
        """Return the first examples of the stream, by which processes are compared, as a batch."""
        return self.thread.call(self._batch, min(self._runs), 0, examples)

    def read(self, spans: Sequence[PositionSpan], committed: Sequence[int], end: Sequence[int]) -> list[Any]:
        """Return a batch for each span; `None` for one without examples.

        Args:
          spans: the span of each worker of this process.
          committed: the cursor of each iterator; earlier positions are not read again.
          end: the cursor of each iterator after the step.
        """
        for shard, run in self._runs.items():
            run.release(committed[shard])
            if not self.how.per_worker:  # read to the step's end, so that all processes see the same ends of epochs
                run.reach(end[0] - 1)
                run.look_behind(end[0])
        return [self._batch(span.shard, span.start, span.stop) for span in spans]

    def why_no_epochs(self) -> str:
        if self.how.length == math.inf:
            return "the data have no end, and no epochs"
        if self.how.per_worker and self.how.length is None:
            return "each worker has an iterator of its own, and the lengths of all are not known (length= sets them)"
        return ""

    def epochs(self, cursors: Sequence[int]) -> float:
        if self.why_no_epochs():
            return 0.0
        return super().epochs(cursors) if self.how.length is not None else self._runs[0].epochs(cursors[0])

    def epoch_length(self, cursors: Sequence[int]) -> int | None:
        if self.why_no_epochs():
            return None
        return len(self) if self.how.length is not None else self._runs[0].epoch_length(cursors[0])

    def place(self, cursors: Sequence[int]) -> str:
        return "" if self.how.per_worker else self._runs[0].place(cursors[0])

    def go_on(self, cursors: Sequence[int], place: str) -> None:
        for shard, run in self._runs.items():
            run.go_on(cursors[shard], place)

    def close(self) -> None:
        for run in self._runs.values():
            self.thread.submit(run.close)


_PROMISE = (
    "data without an index, in the order of their iterator: every process reads all examples and takes its share of "
    "each global batch, so each is taken once per pass, if the iterator is the same on all processes."
)
_PROMISE_OF_EACH = (
    "data of an iterator of each worker's own: each worker reads its batch size from its own iterator. When a worker "
    "leaves, the rest of its data is lost."
)
