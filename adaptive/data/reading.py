"""Read examples of a source, check and stack them. Runs in this process or in a reader process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.arrays import NotAnArrayError, on_host
from adaptive.base.errors import DataError
from adaptive.base.tree_paths import leaf_names

from .one_example import checked, has_lists, narrowing_notes, stacked, taken, with_arrays
from .read_watch import CurrentReads
from .reader_threads import ReaderThreads
from .stored_arrays import MappedFile, StoredArray


class Passes(NamedTuple):
    """The epochs, seed and shard of examples to read, on which their random numbers depend.

    Attributes:
      epochs: the epoch of each example, shape=(k,), or of all.
      seed: the program's seed.
      shard: the index of the data set, if there are several.
    """

    epochs: np.ndarray | int = 0
    seed: int = 0
    shard: int = 0

    def part(self, which: slice | np.ndarray) -> Passes:
        """Return the passes of some of the examples."""
        return self if isinstance(self.epochs, int) else self._replace(epochs=self.epochs[which])

    def of(self, shard: int, which: np.ndarray) -> Passes:
        """Return the passes of some of the examples, which belong to one shard."""
        return self.part(which)._replace(shard=int(shard))


FIRST_PASS = Passes()


def random_numbers(index: int, epoch: int, seed: int, shard: int) -> np.random.Generator:
    """Return the random generator of one example in one epoch, independent of the process and the batch."""
    philox = np.random.Philox(key=[seed & (2**64 - 1), index], counter=[0, 0, 1 + shard, epoch])
    return np.random.Generator(philox)


class ExampleReader:
    """A source with the functions that are applied to each of its examples.

    Args:
      source: `source[i]` is one example.
      transform: function of an example.
      augment: function of an example and its random generator.
      num_threads: how many threads call `source[i]` and the functions at the same time.

    Attributes:
      reads: the current read of each thread.
      narrowing: notes on floats of the first example that are narrowed.
    """

    def __init__(
        self,
        source: Any,
        transform: Callable[[Any], Any] | None = None,
        augment: Callable[[Any, np.random.Generator], Any] | None = None,
        num_threads: int = 1,
    ):
        self.source, self._transform, self._augment = source, transform, augment
        self.num_threads = num_threads
        self.example: Any = None
        self.reads = CurrentReads()
        self.narrowing: tuple[str, ...] = ()
        self._lists = False
        self._threads: ReaderThreads | None = None

    def first(self) -> Any:
        """Read example 0, which defines the structure, shapes and dtypes of all examples."""
        (example,) = self._items(np.zeros(1, int), FIRST_PASS)
        whole = isinstance(self.source, RowsOfArrays) and self._transform is None and self._augment is None
        self._lists = not whole and has_lists(example)  # lists around whole arrays are pytrees
        example = with_arrays(example, "data[0]") if self._lists else example
        self.narrowing = () if whole else narrowing_notes(example, "data[i]")
        self.example = taken(example, "data[0]")
        return self.example

    def rows(self, indices: np.ndarray, passes: Passes) -> Any:
        """Return the examples at these indices as a batch; leaves of shape=(len(indices), …)."""
        if isinstance(self.source, RowsOfArrays) and self._transform is None and self._augment is None:
            try:
                self.reads.begin(int(indices[0]) if len(indices) else "no example", len(indices))
                return self.source.rows(indices)
            finally:
                self.reads.end()
        return stacked(self._items(indices, passes))

    def close(self) -> None:
        """End the reader threads; they start again on demand."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_threads": None}

    def _items(self, indices: np.ndarray, passes: Passes) -> list[Any]:
        """Read examples into a list; as arrays on the host, except when the very first example is read."""
        numbers = [int(i) for i in indices]
        epochs = np.broadcast_to(passes.epochs, len(numbers))
        several = getattr(self.source, "__getitems__", None)  # torch's method of sources that read many at once
        if several is None or self.num_threads > 1:
            if self._threads is None:
                self._threads = ReaderThreads(self.num_threads)

            def read(place: int) -> Any:
                return self._read(self.source.__getitem__, numbers[place], int(epochs[place]), passes)

            return self._threads.map(read, len(numbers))
        try:
            self.reads.begin(numbers[0] if numbers else "no example", len(numbers))
            items = list(several(numbers))
        finally:
            self.reads.end()
        if len(items) != len(numbers):
            raise DataError(f"the data set's __getitems__ gave {len(items)} examples for {len(numbers)} numbers.")
        return [
            self._read(partial(_given, item), number, int(epoch), passes)
            for item, number, epoch in zip(items, numbers, epochs, strict=True)
        ]

    def _read(self, get: Callable[[int], Any], number: int, epoch: int, passes: Passes) -> Any:
        self.reads.begin(number)
        try:
            item = get(number)
            if self._transform is not None:
                item = self._transform(item)
            if self._augment is not None:
                item = self._augment(item, random_numbers(number, epoch, passes.seed, passes.shard))
        except Exception as error:
            error.add_note(f"in reading example {number} of the data")
            raise
        finally:
            self.reads.end()
        if self.example is None:
            return item
        item = with_arrays(item, f"data[{number}]") if self._lists else item
        row = taken(item, f"data[{number}]")
        return checked(row, self.example, f"example {number}")


def _given(item: Any, number: int) -> Any:
    """Return an example that was already read together with others."""
    del number
    return item


class RowsOfArrays:
    """A source of the rows of arrays."""

    def __init__(self, columns: Sequence[np.ndarray | StoredArray], tree: Any):
        self._columns, self._tree = list(columns), tree

    def __len__(self) -> int:
        return int(self._columns[0].shape[0])

    def __getitem__(self, index: int) -> Any:
        return self._tree.unflatten([column[index] for column in self._columns])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return a list of the rows at these indices, read in one go."""
        columns = [column[np.asarray(indices)] for column in self._columns]
        return [self._tree.unflatten(row) for row in zip(*columns, strict=True)]

    def rows(self, indices: np.ndarray) -> Any:
        """Return the rows at these indices as a batch.

        Raises:
          DataError: a number does not fit the width that JAX computes with.
        """
        columns = [column[indices] for column in self._columns]
        try:
            return self._tree.unflatten(map(on_host, columns))
        except NotAnArrayError:
            names = leaf_names(self._tree.unflatten(columns), "data")
            for name, column in zip(names, columns, strict=True):
                try:
                    on_host(column)
                except NotAnArrayError as error:
                    raise DataError(error.about(name, indices)) from error
            raise

    def __getstate__(self) -> tuple[Any, Any]:
        example = self._tree.unflatten(range(self._tree.num_leaves))
        return [(isinstance(c, np.ndarray) and MappedFile.of(c)) or c for c in self._columns], example

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        columns, example = state
        self._columns = [column.opened() if isinstance(column, MappedFile) else column for column in columns]
        self._tree = jax.tree.structure(example)


def joined(batches: Sequence[Any]) -> Any:
    """Concatenate batches."""
    return batches[0] if len(batches) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
