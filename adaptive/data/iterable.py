"""Data without an index: what an iterator gives, in the order in which it gives it.

Every process goes through the same iterator, and takes its workers' share of each global batch. That costs each process
the reading of all examples, and is right whatever is resized and whoever comes or goes: which examples make a step
depends on the global batches alone. What is costly and not needed to go on, decoding and augmenting, belongs in `map=`
and `random_map=`, which are called for a process's own share only. Where even reading is too dear, each worker has an
iterator of its own.
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

_MANY = 2**31 - 1  # the most examples of a batch, where no data set says so


@dataclass(frozen=True, repr=False)
class FromIterator:
    """How to begin an iterator, and what it gives. See `from_iterator`.

    Attributes:
      names: of the parameters of `make` that it is called with.
      length: examples in an epoch, `None` if that is not known, `math.inf` if there are no epochs.
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
        """Whether each worker has an iterator of its own."""
        return "worker" in self.names

    def begin(self, epoch: int, worker: int, workers: int) -> Iterable[Any]:
        """Return what an epoch's examples come from.

        Raises:
          DataError: it gives batches where examples are expected, or a part of the data to each process.
        """
        known = {"epoch": epoch, "worker": worker, "workers": workers}
        made = self.make(**{name: known[name] for name in self.names})
        check_made(made, self.batched, self.per_worker)
        return made

    def __repr__(self) -> str:
        return "data of an iterator" + " for each worker" * self.per_worker


class IterableData:
    """Iterators that have begun: one, or one for each worker of this process.

    Args:
      how: to begin them.
      workers: of all processes.
      mine: the workers of this process.
      world: whose other processes wait while this one reads.

    Attributes:
      thread: reads the iterators, always: some cannot be used in two threads.

    Raises:
      DataError: an iterator gives no examples, or some that cannot be used; or a read takes too long.
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
        """What is to be said of how the data were taken."""
        named = zip(leaf_names(self.example, "example"), jax.tree.leaves(self.example), strict=True)
        leaves = ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in named)
        processes = dict.fromkeys(note for loader in self._loaders.values() for note in loader.notes)
        return (*self.how.notes, *processes, f"of the iterator, one example is {leaves}", *self._narrowing)

    def taken(self, run: ReplayableIterator, shard: int, position: int, seed: int) -> Any:
        """The example at a position, on the host."""
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
        """Those that come first, as far as the first epoch goes: what processes are compared by."""
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
        """While the block lasts, this thread reads; after it, it does not."""
        try:
            yield
        finally:
            self._reads.end()

    def current_reads(self) -> list[CurrentRead]:
        """Return what is being read now."""
        return self._reads.now()

    def abandon(self) -> None:
        """Iterators are ended in the thread that reads them, so there is nothing to do."""

    def shapes(self, examples: int) -> Any:
        """A batch of that many examples, as shapes."""
        return shapes_of(self.example, examples)

    def epochs_are_unknown(self) -> str:
        """Why nobody can tell the epochs of these data; nothing if one can."""
        if self.how.length == math.inf:
            return "the data have no end, and no epochs"
        if self.how.per_worker and self.how.length is None:
            return "each worker has an iterator of its own, and nobody knows the ends of all (length= would say it)"
        return ""

    def close(self) -> None:
        """End the iterators."""
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
    """Data without an index, for `Program`'s `data`: what an iterator gives, in its order.

        def rows(epoch):
            yield from read("train.csv", seed=epoch)

        program = ad.Program(driver, state, ad.data.from_iterator(rows), global_batch=96)

    Every process goes through an iterator that gives the same examples in the same order, and takes its own workers'
    share of each global batch: so each example is in one batch per epoch, whatever is resized and whoever comes or
    goes; but each process reads them all. Nothing is shuffled. If `make` has a parameter `worker`, each worker has an
    iterator of its own instead, and goes through it at the pace of its batch sizes.

    Checkpoints hold where the iterator stands, if it has `get_state` and `set_state`, as grain's have; else an epoch's
    examples are read again and skipped. Of iterators of each worker's own they hold how many examples each has taken,
    which are skipped.

    Args:
      make: a function that begins an epoch: returns an iterator, or what can be iterated. It is called with those of
        `epoch`, `worker` and `workers` that it has as parameters. Or something that can be iterated again and again.
      map: what an example becomes. Called for the share of this process only.
      random_map: the same with random numbers: `fn(example, rng)`, where those of an example depend on the program's
        seed and its position in the stream alone.
      batched: whether the iterator gives batches, of any sizes, which are taken apart: pytrees of arrays, or tables.
      length: examples in an epoch, over all workers, for what goes by epochs. By default an epoch is what the
        iterator gives until it ends; of `math.inf` there are none.
      read_timeout: seconds after which reading one example, or beginning an epoch, fails with a DataError, where a
        step waits for it; 0 for no limit. By default 1.5 times the world's `hang_timeout`, and no limit on one process.

    Raises:
      DataError: `make` is an iterator, which can be gone through once only; or it cannot be called so; or it gives
        batches, and `batched` is not set; or one part of the data of several.
    """
    if length is not None and length != math.inf:
        length = whole(length)
        if length is None or length < 1:
            raise DataError("length= takes the number of examples in an epoch, or math.inf where there are none.")
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
    "data of an iterator of each worker's own: each takes the next of its own, as many as its batch size says. Who "
    "leaves takes the rest of its data with it."
)
_KNOWN = ("epoch", "worker", "workers")


def check_made(made: Any, batched: bool, per_worker: bool) -> None:
    """Raise if what is iterated is known to give something else than it is taken for.

    Raises:
      DataError: batches where examples are expected; or one part of the data of several, to processes that each are to
        go through all of it.
    """
    if not batched:
        refuse_batches(made)
    if not per_worker:
        refuse_parts(made)


def _maker(make: Any) -> tuple[Callable[..., Iterable[Any]], frozenset[str]]:
    if hasattr(make, "__next__"):
        raise DataError(
            f"a {type(make).__name__} can be gone through once only: not for a second epoch, and not again when a "
            "checkpoint is restored. Give a function that begins it:  ad.data.from_iterator(lambda: …)"
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
            f"from_iterator's function is called with those of {', '.join(_KNOWN)} that it has as parameters; it has "
            f"{', '.join(unknown)} besides. Bind them:  lambda epoch: rows(…)"
        )
    return make, frozenset(p.name for p in parameters if p.name in _KNOWN and p.kind != p.POSITIONAL_ONLY)


class _Again:
    """What can be iterated again and again, as a function. Hugging Face's shuffle anew for an epoch that is told."""

    def __init__(self, iterable: Iterable[Any]):
        self._iterable = iterable

    def __call__(self, epoch: int) -> Iterable[Any]:
        if hasattr(self._iterable, "set_epoch"):
            self._iterable.set_epoch(epoch)
        return self._iterable
