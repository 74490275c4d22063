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
from .example import checked, first_taken, random_numbers, shapes_of, stacked, taken
from .fetch_thread import FetchThread, checked_timeout
from .lookahead import PositionSpan
from .replay import ReplayableIterator
from .rows import ShardRange

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


class IterableData:
    """Iterators in progress: one, or one for each worker of this process.

    Args:
      how: makes the iterators.
      workers: number of workers of all processes.
      mine: the workers of this process.
      world: the world whose other processes wait while this one reads; `None` if there are none.

    Attributes:
      thread: the thread of all reads, since some iterators cannot be used by two threads.

    Raises:
      DataError: an iterator yields no examples, or unusable ones; or a read takes too long.
    """

    in_memory = by_row = False

    def __init__(self, how: FromIterator, workers: int, mine: Sequence[int], world: World | None = None):
        self.how, self._workers = how, workers
        self.thread = FetchThread(how.read_timeout, world)
        length = None if how.per_worker else how.length
        shards = list(mine) or [0] if how.per_worker else [0]
        self._runs = {shard: ReplayableIterator(partial(self._begin, shard), length) for shard in shards}
        self.example: Any = None
        self.thread.call(self._read_first, shards[0])
        self.length = int(how.length) if how.length is not None and how.length != math.inf else _MANY
        self.shard_ranges = (ShardRange(0, self.length),) * (workers if how.per_worker else 1)

    def __len__(self) -> int:
        return self.length

    def _begin(self, shard: int, epoch: int) -> Iterable[Any]:
        """Start an epoch of a worker's iterator, or of the one that all share."""
        known = {"epoch": epoch, "worker": shard, "workers": self._workers}
        made = self.how.make(**{name: known[name] for name in self.how.names})
        refuse_batches(made)
        return made

    def _read_first(self, shard: int) -> None:
        self._runs[shard].reach(0)
        example, narrowing = first_taken(self._item(shard, 0, seed=0), "example 0")
        named = zip(leaf_names(example, "example"), jax.tree.leaves(example), strict=True)
        leaves = ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in named)
        promise = _PROMISE_OF_EACH if self.how.per_worker else _PROMISE
        self.example, self.notes = example, (promise, f"of the iterator, one example is {leaves}", *narrowing)

    def _item(self, shard: int, position: int, seed: int) -> Any:
        item = self._runs[shard].example(position)
        try:
            if self.how.transform is not None:
                item = self.how.transform(item)
            if self.how.augment is not None:
                item = self.how.augment(item, random_numbers(position, 0, seed, shard))
        except Exception as error:
            error.add_note(f"in example {position} of the iterator")
            raise
        return item

    def _example(self, shard: int, position: int, seed: int) -> Any:
        """Return the example at a position that was reached, transformed, on the host."""
        row = taken(self._item(shard, position, seed), f"example {position}")
        return checked(row, self.example, f"example {position}")

    def first_examples(self, most: int) -> list[Any]:
        """Return the first examples of the first epoch, at most this many, by which processes are compared."""
        shard, run = min(self._runs.items())

        def read() -> list[Any]:
            run.reach(most - 1)
            return [self._example(shard, position, seed=0) for position in range(min(most, run.next))]

        return self.thread.call(read)

    def read(self, spans: Sequence[PositionSpan], committed: Sequence[int], end: Sequence[int], seed: int) -> list[Any]:
        """Return a batch for each span; `None` for one without examples.

        Args:
          spans: the span of each worker of this process.
          committed: the cursor of each iterator; earlier positions are not read again.
          end: the cursor of each iterator after the step.
          seed: the seed of the examples' random numbers.
        """
        for shard, run in self._runs.items():
            run.release(committed[shard])
            if not self.how.per_worker:  # read to the step's end, so that all processes see the same ends of epochs
                run.reach(end[0] - 1)
                run.look_behind(end[0])
        batches = []
        for span in spans:
            self._runs[span.shard].reach(span.stop - 1)
            rows = [self._example(span.shard, p, seed) for p in range(span.start, span.stop)]
            batches.append(stacked(rows) if rows else None)
        return batches

    def shapes(self, examples: int) -> Any:
        """Return a batch of this many examples, as `jax.ShapeDtypeStruct`s."""
        return shapes_of(self.example, examples)

    # --- epochs and restores ------------------------------------------------------------------------------------------

    def epochs_are_unknown(self) -> str:
        """Return the reason why the epochs of these data are unknown; "" if they are known."""
        if self.how.length == math.inf:
            return "the data have no end, and no epochs"
        if self.how.per_worker and self.how.length is None:
            return "each worker has an iterator of its own, and the lengths of all are not known (length= sets them)"
        return ""

    def epochs(self, cursors: Sequence[int]) -> float:
        """Return the number of epochs consumed, as a fraction if their length is known. Replicated."""
        if self.epochs_are_unknown():
            return 0.0
        return sum(cursors) / self.length if self.how.length is not None else self._runs[0].epochs(cursors[0])

    def epoch_length(self, cursors: Sequence[int]) -> int | None:
        """Return the number of examples of an epoch; `None` if unknown. Replicated."""
        if self.epochs_are_unknown():
            return None
        return self.length if self.how.length is not None else self._runs[0].epoch_length(cursors[0])

    def place(self, cursors: Sequence[int]) -> str:
        """Return a text to resume a shared iterator at the cursors; "" for iterators per worker. Replicated."""
        return "" if self.how.per_worker else self._runs[0].place(cursors[0])

    def go_on(self, cursors: Sequence[int], place: str) -> None:
        """Resume the iterators at the cursors. Called in the data's thread."""
        for shard, run in self._runs.items():
            run.go_on(cursors[shard], place)

    def close(self) -> None:
        """Close the iterators. Called in the data's thread."""
        for run in self._runs.values():
            run.close()


_PROMISE = (
    "data without an index, in the order of their iterator: every process reads all examples and takes its share of "
    "each global batch, so each is taken once per pass, if the iterator is the same on all processes."
)
_PROMISE_OF_EACH = (
    "data of an iterator of each worker's own: each worker reads its batch size from its own iterator. When a worker "
    "leaves, the rest of its data is lost."
)
