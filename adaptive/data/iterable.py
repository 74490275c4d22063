"""Data without an index: the examples of an iterator, in its order.

Every process iterates over the same examples and takes its workers' share of each global batch. Each process therefore
reads all examples, and the examples of a step depend only on the global batches, even if batch sizes or workers change.
Expensive work on single examples, such as decoding and augmentation, belongs in `map=` and `random_map=`, which are
called for a process's own share only. If even reading is too expensive, each worker can have its own iterator.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from adaptive.base.ambient import AmbientContext
from adaptive.base.errors import DataError
from adaptive.base.numbers import whole
from adaptive.base.tree_paths import leaf_names
from adaptive.base.world import World

from .batches import refuse_batches, refuse_parts
from .examples import ShardRange, shapes_of
from .fetch_thread import FetchThread
from .hugging_face import typed_examples
from .one_example import checked, has_lists, narrowing_notes, taken, with_arrays
from .read_watch import CurrentRead, CurrentReads, ReadWatch, checked_timeout
from .reading import random_numbers
from .replay import ReplayableIterator
from .torch_loaders import LoaderEpochs, is_loader

T = TypeVar("T")

_MANY = 2**31 - 1  # upper bound of a batch size, if the number of examples is unknown


@dataclass(frozen=True, repr=False)
class FromIterator:
    """A function that makes an iterator, and how to read its examples. See `from_iterator`.

    Attributes:
      make: the function that starts an epoch.
      names: those of "epoch", "worker" and "workers" that are parameters of `make`.
      transform: function of an example, or `None`.
      augment: function of an example and its random generator, or `None`.
      batched: whether the iterator yields batches, which are split into examples.
      length: number of examples in an epoch; `None` if unknown, `math.inf` if there are no epochs.
      notes: notes for the user on how the data were interpreted.
      read_timeout: seconds after which reading one example fails; `None` for the default, 0 for no limit.
    """

    make: Callable[..., Iterable[Any]]
    names: frozenset[str]
    transform: Callable[[Any], Any] | None = None
    augment: Callable[[Any, np.random.Generator], Any] | None = None
    batched: bool = False
    length: float | None = None
    notes: tuple[str, ...] = ()
    read_timeout: float | None = None

    @property
    def per_worker(self) -> bool:
        """Whether each worker has its own iterator."""
        return "worker" in self.names

    def begin(self, epoch: int, worker: int, workers: int) -> Iterable[Any]:
        """Start an epoch: return an iterable of its examples.

        Raises:
          DataError: it yields batches where examples are expected, or one part of the data to each process.
        """
        known = {"epoch": epoch, "worker": worker, "workers": workers}
        made = self.make(**{name: known[name] for name in self.names})
        check_made(made, self.batched, self.per_worker)
        return made

    def __repr__(self) -> str:
        return "data of an iterator" + " for each worker" * self.per_worker


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

    in_memory = mapped = _lists = False

    def __init__(self, how: FromIterator, workers: int, mine: Sequence[int], world: World | None = None):
        self.how, self.read_timeout = how, how.read_timeout
        self._reads = CurrentReads("of the iterator")
        self.thread, self._ambient = FetchThread("adaptive-input"), AmbientContext()
        self._watch = ReadWatch(self, world)
        own = list(mine) or [0]
        length = None if how.per_worker else how.length
        shards = own if how.per_worker else [0]
        self._workers = workers
        self._loaders = {shard: LoaderEpochs(warns=how.per_worker or 0 in mine) for shard in shards}
        self.runs = {
            shard: ReplayableIterator(partial(self._begin, shard), how.batched, length, self._reads) for shard in shards
        }
        first = self.runs[own[0] if how.per_worker else 0]
        shard = own[0] if how.per_worker else 0

        def read() -> Any:
            first.reach(0)
            return self.taken(first, shard, 0, seed=0)

        self.example = self._in_thread(read)
        self.length = int(how.length) if how.length is not None and how.length != math.inf else _MANY
        self.shard_ranges = (ShardRange(0, self.length),) * (workers if how.per_worker else 1)

    def _begin(self, shard: int, epoch: int) -> Iterable[Any]:
        made = self.how.begin(epoch, shard, self._workers)
        return self._loaders[shard].begin(made, epoch) if is_loader(made) else made

    def __len__(self) -> int:
        return self.length

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how the data were interpreted."""
        named = zip(leaf_names(self.example, "example"), jax.tree.leaves(self.example), strict=True)
        leaves = ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in named)
        processes = dict.fromkeys(note for loader in self._loaders.values() for note in loader.notes)
        return (*self.how.notes, *processes, f"of the iterator, one example is {leaves}", *self._narrowing)

    def taken(self, run: ReplayableIterator, shard: int, position: int, seed: int) -> Any:
        """Return the example at a position, transformed, on the host.

        Args:
          run: the iterator, which has reached the position.
          shard: the worker whose iterator it is; 0 if all workers share it.
          position: the position in the stream.
          seed: the program's seed.

        Raises:
          DataError: the example has no arrays, or not the structure, shapes and dtypes of the first one.
        """
        item = run.example(position)
        self._reads.begin(position)
        try:
            if self.how.transform is not None:
                item = self.how.transform(item)
            if self.how.augment is not None:
                item = self.how.augment(item, random_numbers(position, 0, seed, shard))
        except Exception as error:
            error.add_note(f"in example {position} of the iterator")
            raise
        begun = hasattr(self, "example")
        self._lists = self._lists if begun else has_lists(item)
        item = with_arrays(item, f"example {position}") if self._lists else item
        row = taken(item, f"example {position}")
        if begun:
            return checked(row, self.example, f"example {position}")
        if not jax.tree.leaves(row):
            raise DataError(f"example 0 of the iterator has no arrays: {item!r}.")
        self._narrowing = narrowing_notes(item, "example")
        return row

    def first_examples(self, most: int) -> list[Any]:
        """Return the first examples of the first epoch, at most this many, by which processes are compared."""
        shard, run = min(self.runs), self.runs[min(self.runs)]

        def read() -> list[Any]:
            run.reach(most - 1)
            return [self.taken(run, shard, position, seed=0) for position in range(min(most, run.next))]

        return self._in_thread(read)

    def _in_thread(self, function: Callable[[], T]) -> T:
        def read() -> T:
            with self.reading():
                return function()

        return self._watch.result(self.thread.submit(self._ambient.run, read))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Clear this thread's current read at the end of the `with` block."""
        try:
            yield
        finally:
            self._reads.end()

    def current_reads(self) -> list[CurrentRead]:
        """Return the reads in progress."""
        return self._reads.now()

    def abandon(self) -> None:
        """Do nothing: iterators are closed in the thread that reads them."""

    def shapes(self, examples: int) -> Any:
        """Return a batch of this many examples, as `jax.ShapeDtypeStruct`s."""
        return shapes_of(self.example, examples)

    def epochs_are_unknown(self) -> str:
        """Return the reason why the epochs of these data are unknown; "" if they are known."""
        if self.how.length == math.inf:
            return "the data have no end, and no epochs"
        if self.how.per_worker and self.how.length is None:
            return "each worker has an iterator of its own, and the lengths of all are not known (length= sets them)"
        return ""

    def close(self) -> None:
        """Close the iterators and end loaders' workers."""
        for run in self.runs.values():
            run.close()
        for loader in self._loaders.values():
            loader.close()


def from_iterator(
    make: Callable[..., Iterable[Any]] | Iterable[Any],
    *,
    map: Callable[[Any], Any] | None = None,
    random_map: Callable[[Any, np.random.Generator], Any] | None = None,
    batched: bool = False,
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
      make: a function that starts an epoch: returns an iterator or an iterable. It is called with those of `epoch`,
        `worker` and `workers` that are its parameters. Or an iterable that can be iterated repeatedly.
      map: `fn(example)`, applied to each example of this process's share.
      random_map: `fn(example, rng)`, like `map` with random numbers, which depend only on the program's seed and the
        example's position in the stream.
      batched: whether the iterator yields batches, of any sizes, which are split into examples: pytrees of arrays, or
        tables.
      length: number of examples in an epoch, over all workers, for options in epochs. By default an epoch ends when the
        iterator ends; with `math.inf` there are no epochs.
      read_timeout: seconds after which reading one example, or starting an epoch, for a waiting step fails with a
        DataError; 0 for no limit. By default 1.5 times the world's `hang_timeout`, and no limit on one process.

    Raises:
      DataError: `make` is an iterator, which can be iterated only once; or it has other parameters; or it yields
        batches, and `batched` is not set; or it yields one part of a data set to each process.
    """
    if length is not None and length != math.inf:
        length = whole(length)
        if length is None or length < 1:
            raise DataError("length= must be the number of examples in an epoch, or math.inf for data without epochs.")
    check_made(make, batched, per_worker=False)
    make = typed_examples(make, strict=not (map or random_map))
    timeout = checked_timeout(read_timeout)
    how = FromIterator(*_maker(make), map, random_map, bool(batched), length, read_timeout=timeout)
    return replace(how, notes=(_PROMISE_OF_EACH if how.per_worker else _PROMISE,))


_PROMISE = (
    "data without an index, in the order of their iterator: every process reads all examples and takes its share of "
    "each global batch, so each is taken once per pass, if the iterator is the same on all processes."
)
_PROMISE_OF_EACH = (
    "data of an iterator of each worker's own: each worker reads its batch size from its own iterator. When a worker "
    "leaves, the rest of its data is lost."
)
_KNOWN = ("epoch", "worker", "workers")


def check_made(made: Any, batched: bool, per_worker: bool) -> None:
    """Raise if an iterable is known to yield batches or a part of the data where it should not.

    Raises:
      DataError: it yields batches where examples are expected, or one part of a data set to processes that each iterate
        over all of it.
    """
    if not batched:
        refuse_batches(made)
    if not per_worker:
        refuse_parts(made)


def _maker(make: Any) -> tuple[Callable[..., Iterable[Any]], frozenset[str]]:
    if hasattr(make, "__next__"):
        raise DataError(
            f"a {type(make).__name__} can be iterated over only once: not for a second epoch, and not again after a "
            "restore. Pass a function that returns it:  ad.data.from_iterator(lambda: …)"
        )
    if not callable(make):
        if not hasattr(make, "__iter__"):
            raise DataError(f"from_iterator takes a function that returns an iterator; got a {type(make).__name__}.")
        return _Again(make), frozenset({"epoch"})
    parameters = inspect.signature(make).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    unknown = [p.name for p in parameters if p.name not in _KNOWN and p.default is p.empty and p.kind not in kinds]
    if unknown:
        raise DataError(
            f"the function of from_iterator may have the parameters {', '.join(_KNOWN)}; this one also has "
            f"{', '.join(unknown)}. Bind them:  lambda epoch: rows(…)"
        )
    return make, frozenset(p.name for p in parameters if p.name in _KNOWN and p.kind != p.POSITIONAL_ONLY)


class _Again:
    """A function of the epoch that returns the same iterable; calls the `set_epoch` of those that shuffle by epoch."""

    def __init__(self, iterable: Iterable[Any]):
        self._iterable = iterable

    def __call__(self, epoch: int) -> Iterable[Any]:
        if hasattr(self._iterable, "set_epoch"):
            self._iterable.set_epoch(epoch)
        return self._iterable
