"""Data with an index: a pytree of arrays with a row per example, or a source, whose `data[i]` is one example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import repeat
from operator import getitem
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from adaptive.base.arrays import is_array
from adaptive.base.errors import DataError
from adaptive.base.numbers import whole
from adaptive.base.tree_paths import leaf_names

from .advice import refuse_foreign
from .example import checked, first_taken, narrowing_notes, random_numbers, shapes_of, stacked, taken
from .fetch_thread import DaemonThreads, FetchThread, begin_read, checked_timeout
from .reader_processes import ReaderProcesses, result_of

_ENDLESS = 2**62  # from this length on, data repeat without end; grain returns 2**63 - 1 for them
_CHUNKS, _LARGEST_CHUNK = 4, 256  # chunks of a batch per reader process, which balances the processes


@runtime_checkable
class RandomAccess(Protocol):
    """A source: `source[i]` is one example, a pytree of arrays and numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class ShardRange(NamedTuple):
    """The rows of a shard within the whole data set: `length` rows from index `start` on."""

    start: int
    length: int


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


FIRST_PASS = Passes()


class Rows:
    """A data set whose rows the program reads by index; an abstract class.

    Attributes:
      length: number of examples.
      example: one row, on the host.
      shard_ranges: one range that all workers share, or one range per worker.
      by_row: whether rows are taken from arrays, without user code.
      in_memory: whether these arrays are in memory.
      readers: the number of threads or processes that read ahead; 0 if the fetch thread itself reads.
      processes: whether the readers are processes.
      notes: notes for the user on how the data were interpreted.
      read_timeout: seconds after which a read fails; `None` for the default, 0 for no limit.
    """

    length: int
    example: Any
    shard_ranges: tuple[ShardRange, ...]
    by_row = in_memory = processes = False
    readers = 0
    notes: tuple[str, ...] = ()
    read_timeout: float | None = None

    def __len__(self) -> int:
        return self.length

    def shapes(self, examples: int) -> Any:
        """Return a batch of this many examples, as `jax.ShapeDtypeStruct`s."""
        return shapes_of(self.example, examples)

    def rows(self, indices: np.ndarray) -> Any:
        """Return the examples at these indices, in their first epoch, as a batch; leaves of shape=(len(indices), …)."""
        raise NotImplementedError

    def submit(self, indices: np.ndarray, passes: Passes) -> Future[list[Any]]:
        """Start to read the examples at these indices, all of one shard. Called in a fetch thread."""
        raise NotImplementedError

    def result(self, read: Future[list[Any]], index: int) -> list[Any]:
        """Return the examples that were read. Called in a fetch thread, which waits for the one at `index`.

        Raises:
          ReadersLostError: a reader process was lost, with all reads in progress.
        """
        if not read.done():
            begin_read(f"example {index} of the data{' from a reader process' * self.processes}")
        return result_of(read)

    def chunk(self, examples: int) -> int:
        """Return the number of examples of a batch that one reader reads per task."""
        if not self.processes:
            return 1
        return min(max(1, -(-examples // (_CHUNKS * self.readers))), _LARGEST_CHUNK)

    def close(self) -> None:
        """End the reader processes; they start again on demand."""


class ArrayRows(Rows):
    """A pytree of arrays with a common leading axis. Memory-mapped arrays stay on disk, in their own width.

    Raises:
      DataError: leaves of different lengths, no leaves, no examples, or leaves that hold no numbers.
    """

    def __init__(self, data: Any):
        leaves, self._tree = jax.tree.flatten(data)
        names = leaf_names(data, "data")
        for name, leaf in zip(names, leaves, strict=True):
            refuse_foreign(leaf, name)
        self._columns = [_column(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
        self.length = _common_length(data, names, self._columns)
        self.notes = narrowing_notes(data, "data")
        self.by_row, self.in_memory = True, not any(map(_is_mapped, self._columns))
        self.example = taken(self._tree.unflatten([column[0] for column in self._columns]), "data[0]")
        self.shard_ranges = (ShardRange(0, self.length),)

    def __repr__(self) -> str:
        return f"{self.length} examples"

    def rows(self, indices: np.ndarray) -> Any:
        rows = self._tree.unflatten(map(getitem, self._columns, repeat(indices)))  # in C: on the path of every step
        return rows if self.in_memory else taken(rows, "data", indices)

    def submit(self, indices: np.ndarray, passes: Passes) -> Future[list[Any]]:
        del passes
        rows, read = self.rows(indices), Future[list[Any]]()
        read.set_result([jax.tree.map(lambda leaf, i=i: leaf[i], rows) for i in range(len(indices))])
        return read


class SourceRows(Rows):
    """A source, read by threads or processes.

    Args:
      source: `source[i]` is one example.
      transform: function of an example.
      augment: function of an example and its random generator.
      num_readers: number of reader processes.
      num_threads: number of threads that read at the same time, if there are no processes.
      read_timeout: seconds after which a read fails; `None` for the default, 0 for no limit.

    Raises:
      DataError: the source is empty or endless, or example 0 has no arrays of numbers.
    """

    def __init__(
        self,
        source: Any,
        transform: Callable[[Any], Any] | None = None,
        augment: Callable[[Any, np.random.Generator], Any] | None = None,
        num_readers: int = 0,
        num_threads: int = 1,
        read_timeout: float | None = None,
    ):
        self.length = len(source)
        if self.length == 0:
            raise DataError("the data set is empty: len(data) is 0.")
        if self.length >= _ENDLESS:
            raise DataError(
                f"len(data) is {self.length}: the data are repeated without end. Leave out .repeat(), because the "
                "program repeats the data in every epoch."
            )
        self.processes, self.read_timeout = bool(num_readers), read_timeout
        self.readers = num_readers or (num_threads if num_threads > 1 else 0)
        self._reader = _ExampleReader(source, transform, augment)
        self.thread = FetchThread(read_timeout, abandon=self.close)
        self._threads = DaemonThreads(num_threads) if num_threads > 1 else None
        self._processes = ReaderProcesses(self._reader, num_readers) if num_readers else None
        self.example, self.notes = self.thread.call(self._reader.first)
        self.shard_ranges = (ShardRange(0, self.length),)

    def __repr__(self) -> str:
        by = f"{self.readers} {'processes' if self.processes else 'threads'}" if self.readers else "a thread"
        return f"{self.length} examples, read by {by}"

    def rows(self, indices: np.ndarray) -> Any:
        return self.thread.call(self._rows, indices)

    def _rows(self, indices: np.ndarray) -> Any:
        size = self.chunk(len(indices))
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        reads = [(self.submit(part, FIRST_PASS), int(part[0])) for part in parts]
        return stacked([row for read, index in reads for row in self.result(read, index)])

    def submit(self, indices: np.ndarray, passes: Passes) -> Future[list[Any]]:
        if self._processes is not None:
            return self._processes.submit(indices, passes)
        if self._threads is not None:
            return self._threads.submit(self._reader.read, indices, passes)
        read: Future[list[Any]] = Future()
        try:
            read.set_result(self._reader.read(indices, passes))
        except Exception as error:  # raised by the step that needs the example
            read.set_exception(error)
        return read

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()


class _ExampleReader:
    """A source with the functions that are applied to each of its examples."""

    def __init__(self, source: Any, transform: Any, augment: Any):
        self._source, self._transform, self._augment = source, transform, augment
        self._first: Any = None

    def first(self) -> tuple[Any, tuple[str, ...]]:
        """Read example 0, which defines the structure, shapes and dtypes of all, and return notes on it."""
        self._first, notes = first_taken(self._read(0, 0, FIRST_PASS), "data[0]")
        return self._first, notes

    def read(self, indices: np.ndarray, passes: Passes) -> list[Any]:
        """Return the examples at these indices, on the host."""
        rows, epochs = [], np.broadcast_to(passes.epochs, len(indices))
        for index, epoch in zip(indices.tolist(), epochs.tolist(), strict=True):
            row = taken(self._read(index, epoch, passes), f"data[{index}]")
            rows.append(checked(row, self._first, f"example {index}"))
        return rows

    def _read(self, index: int, epoch: int, passes: Passes) -> Any:
        begin_read(f"example {index} of the data")
        try:
            item = self._source[index]
            if self._transform is not None:
                item = self._transform(item)
            if self._augment is not None:
                item = self._augment(item, random_numbers(index, epoch, passes.seed, passes.shard))
        except Exception as error:
            error.add_note(f"in reading example {index} of the data, a {type(self._source).__name__}")
            raise
        return item


class _RowsOfArrays:
    """A source of the rows of arrays, for functions of an example."""

    def __init__(self, arrays: Any):
        self._arrays = arrays

    def __len__(self) -> int:
        return len(jax.tree.leaves(self._arrays)[0])

    def __getitem__(self, index: int) -> Any:
        return jax.tree.map(lambda column: column[index], self._arrays)


# --- interpreting the data --------------------------------------------------------------------------------------------


def from_source(
    data: Any,
    *,
    map: Callable[[Any], Any] | None = None,
    random_map: Callable[[Any, np.random.Generator], Any] | None = None,
    num_readers: int = 0,
    num_threads: int = 1,
    read_timeout: float | None = None,
) -> Rows:
    """Return data with an index for `Program`, `Shards` and `evaluate`, with functions to apply to each example.

        data = ad.data.from_source(files, map=decode, random_map=crop, num_readers=8)
        program = ad.Program(driver, state, data, global_batch=96)

    Each example is used once per epoch, in an order that the program's seed determines, even if workers or batch sizes
    change. A batch that spans the end of an epoch can hold one example twice, once for each epoch. Use this function to
    transform examples or to read them by several threads or processes; otherwise `Program(data=…)` takes the same data
    directly.

    Args:
      data: a pytree of arrays with a row per example, or an object with `len(data)` and `data[i]`.
      map: `fn(example)`, applied to each example; returns a pytree of arrays and numbers.
      random_map: `fn(example, rng)`, like `map` with random numbers. An example's `rng` depends only on the program's
        seed, the epoch and the example's index, not on which process reads it; `evaluate` uses the first epoch's.
      num_readers: number of reader processes for each process of the program; 0 to read in threads. Reader processes
        start on demand. Their code is sent by cloudpickle, so scripts need no `if __name__ == "__main__"`.
      num_threads: how many threads of each process call `data[i]` and the functions at the same time, on the same
        objects; 1 by default, because few data sets are written for threads. Several help where reading waits for a
        disk or a network. Arrays without functions are read by row, in one go, whatever it says.
      read_timeout: seconds after which one read for a waiting step fails with a DataError; 0 for no limit. A thread
        reads one example at a time, a process some examples of a batch. By default 1.5 times the world's
        `hang_timeout`, and no limit on one process.

    Raises:
      DataError: the data cannot be used, or have no index; says the line to write instead.
    """
    if whole(num_readers) is None or num_readers < 0:
        raise DataError(f"num_readers= must be a number of processes; got {num_readers!r}.")
    if whole(num_threads) is None or num_threads < 1:
        raise DataError(f"num_threads= must be a number of threads, at least 1; got {num_threads!r}.")
    if num_threads > 1 and num_readers:
        raise DataError("pass num_readers= (processes) or num_threads=, not both.")
    if isinstance(data, Rows):
        raise DataError(f"{data!r}: pass map=, random_map=, num_readers=, num_threads= and read_timeout= in one call.")
    read_timeout = checked_timeout(read_timeout)
    if not _is_source(data):
        arrays = ArrayRows(data)
        if map is None and random_map is None:
            return arrays
        data = _RowsOfArrays(data)
    return SourceRows(data, map, random_map, int(num_readers), int(num_threads), read_timeout)


def rows_of(data: Any) -> Rows:
    """Return a user's data with an index as rows.

    Raises:
      DataError: the data cannot be used, or have no index; says the line to write instead.
    """
    if isinstance(data, Rows):
        return data
    return SourceRows(data) if _is_source(data) else ArrayRows(data)


def _is_source(data: Any) -> bool:
    """Return whether data are read one by one, as `data[i]`. Raises with advice for other libraries' types."""
    refuse_foreign(data)
    if isinstance(data, list | tuple) or is_array(data) or not jax.tree_util.all_leaves([data]):
        return False
    if isinstance(data, Mapping):
        raise DataError(f"data is a {type(data).__name__}, which JAX takes for a single leaf. Pass dict(data).")
    return isinstance(data, RandomAccess)


def _is_mapped(column: np.ndarray) -> bool:
    base: Any = column
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return isinstance(base, np.memmap)


def _column(leaf: Any, name: str) -> Any:
    if isinstance(leaf, np.ndarray) and _is_mapped(leaf):
        taken(np.asarray(leaf)[:1], name)
        return np.asarray(leaf)
    return taken(leaf, name)


def _common_length(data: Any, names: Sequence[str], columns: list[np.ndarray]) -> int:
    """Return the number of examples, after checking that all leaves have it.

    Raises:
      DataError: no leaves, a leaf without axes, leaves of different lengths, or no examples.
    """
    if not columns:
        raise DataError(f"the data set has no arrays: {data!r}. Pass a pytree of arrays with one leading axis.")
    for name, column in zip(names, columns, strict=True):
        if column.ndim == 0:
            raise DataError(
                f"{name} is a single number; every leaf needs a leading axis, one row per example. JAX takes a Python "
                "list for a pytree of its items: write np.asarray(x) for a list of numbers."
            )
    lengths = [column.shape[0] for column in columns]
    odd = next((i for i, length in enumerate(lengths) if length != lengths[0]), 0)
    if odd:
        raise DataError(
            f"the data set's leaves have different numbers of examples: {names[0]}: {lengths[0]}, {names[odd]}: "
            f"{lengths[odd]}. If these are examples, stack them:  jax.tree.map(lambda *xs: np.stack(xs), *data)"
        )
    if lengths[0] == 0:
        raise DataError(f"the data set is empty: {names[0]} has shape {columns[0].shape}.")
    return lengths[0]
