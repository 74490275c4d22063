"""Data with an index: a pytree of arrays with a row per example, or a source, whose `data[i]` is one example."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import repeat
from operator import getitem
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.arrays import is_array
from adaptive.base.errors import DataError
from adaptive.base.numbers import whole
from adaptive.base.tree_paths import leaf_names

from .advice import refuse_foreign
from .example import checked, first_taken, joined, random_numbers, shapes_of, stacked, taken
from .fetch_thread import DaemonThreads, FetchThread, begin_read
from .reader_processes import ReaderProcesses, result_of

_ENDLESS = 2**62  # from this length on, data repeat without end; grain returns 2**63 - 1 for them
# A reader process reads its equal part of a batch at a time: one task for each process and batch. Against four parts
# each, it was faster in some runs for sources that wait, and slower in some for sources that compute.
_LARGEST_PIECE = 256


class ShardRange(NamedTuple):
    """The rows of a shard within the whole data set: `length` rows from index `start` on."""

    start: int
    length: int


class ReadRequest(NamedTuple):
    """Examples to read, all of one shard; the last three attributes determine their random numbers.

    Attributes:
      indices: their indices in the data; shape=(k,).
      epochs: the epoch of each; shape=(k,).
      seed: the program's seed.
      shard: the number of the data set, if there are several.
    """

    indices: np.ndarray
    epochs: np.ndarray
    seed: int
    shard: int


class Data:
    """Training data; an abstract class.

    Attributes:
      example: one example, on the host.
      shard_ranges: one range that all workers share, or one range per worker.
      in_memory: whether examples are rows of arrays in memory.
      processes: whether other processes read.
      notes: notes for the user on how the data were interpreted.
      thread: the thread that reads, or waits for the readers.
    """

    example: Any
    shard_ranges: tuple[ShardRange, ...]
    in_memory = processes = False
    notes: tuple[str, ...] = ()
    thread: FetchThread

    def __len__(self) -> int:
        last = self.shard_ranges[-1]
        return last.start + last.length

    def shapes(self, examples: int) -> Any:
        """Return a batch of this many examples, as `jax.ShapeDtypeStruct`s."""
        return shapes_of(self.example, examples)

    def why_no_epochs(self) -> str:
        """Return the reason why the epochs of these data are unknown; "" if they are known."""
        return ""

    def epochs(self, cursors: Sequence[int]) -> float:
        """Return the number of epochs consumed, as a fraction if their length is known. Replicated."""
        return sum(cursors) / len(self)

    def epoch_length(self, cursors: Sequence[int]) -> int | None:
        """Return the number of examples of an epoch; `None` if unknown. Replicated."""
        del cursors
        return len(self)

    def place(self, cursors: Sequence[int]) -> str:
        """Return the text that, with the cursors, is needed to resume there; "" if there is none. Local."""
        del cursors
        return ""

    def go_on(self, cursors: Sequence[int], place: str) -> None:
        """Resume at the cursors. Called in the data's thread."""

    def close(self) -> None:
        """End iterators and reader processes, without waiting for a read: it may hang. Processes start again on
        demand.
        """


class Rows(Data):
    """A data set whose rows the program reads by index; an abstract class.

    Attributes:
      by_row: whether rows are taken from arrays, without user code.
      readers: the number of threads or processes that read ahead; 0 if the fetch thread itself reads.
    """

    by_row = False
    readers = 0

    def __init__(self, read_timeout: float | None = None):
        self.thread = FetchThread(read_timeout, abandon=self.close)

    def rows(self, indices: np.ndarray) -> Any:
        """Return the examples at these indices, in their first epoch, as a batch; leaves of shape=(len(indices), …)."""
        raise NotImplementedError

    def submit(self, request: ReadRequest) -> Future[Any]:
        """Start to read examples, as a batch. Called in a fetch thread."""
        return _done(self.rows, request.indices)

    def result(self, read: Future[Any], index: int) -> Any:
        """Return a batch that is being read, whose first example has this index. Called in a fetch thread.

        Raises:
          DataError: a reader process was lost, with all reads in progress.
        """
        if not read.done():
            begin_read(f"example {index} of the data{' from a reader process' * self.processes}")
        return result_of(read)

    def piece(self, examples: int) -> int:
        """Return the number of examples that a reader reads at a time, of a batch of this many."""
        if self.processes:
            return min(max(1, -(-examples // self.readers)), _LARGEST_PIECE)
        return 1 if self.readers else max(1, examples)


def _done(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in this thread; an error is raised by the step that needs the result."""
    done: Future[Any] = Future()
    try:
        done.set_result(function(*args))
    except Exception as error:
        done.set_exception(error)
    return done


class ArrayRows(Rows):
    """A pytree of arrays with a common leading axis. Memory-mapped arrays stay on disk, in their own width.

    Raises:
      DataError: leaves of different lengths, no leaves, no examples, or leaves that hold no numbers.
    """

    by_row = True

    def __init__(self, data: Any):
        super().__init__()
        leaves, self._tree = jax.tree.flatten(data)
        names = leaf_names(data, "data")
        for name, leaf in zip(names, leaves, strict=True):
            refuse_foreign(leaf, name)
        self._columns = [_column(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
        self.shard_ranges = (ShardRange(0, _common_length(data, names, self._columns)),)
        self.in_memory = not any(map(_is_mapped, self._columns))
        self.example = taken(self._tree.unflatten([column[0] for column in self._columns]), "data[0]")

    def __repr__(self) -> str:
        return f"{len(self)} examples"

    def rows(self, indices: np.ndarray) -> Any:
        rows = self._tree.unflatten(map(getitem, self._columns, repeat(indices)))  # in C: on the path of every step
        return rows if self.in_memory else taken(rows, "data", indices)


class SourceRows(Rows):
    """A source, read by threads or processes; arguments as for `from_source`.

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
        super().__init__(read_timeout)
        length = len(source)
        if length == 0:
            raise DataError("the data set is empty: len(data) is 0.")
        if length >= _ENDLESS:
            raise DataError(
                f"len(data) is {length}: the data are repeated without end. Leave out .repeat(), because the "
                "program repeats the data in every epoch."
            )
        self.shard_ranges, self.processes = (ShardRange(0, length),), bool(num_readers)
        self.readers = num_readers or (num_threads if num_threads > 1 else 0)
        self._reader = _ExampleReader(source, transform, augment)
        self._threads = DaemonThreads(num_threads) if num_threads > 1 else None
        self._processes = ReaderProcesses(self._reader, num_readers) if num_readers else None
        self.example = self.thread.call(self._reader.first)

    def __repr__(self) -> str:
        by = f"{self.readers} {'processes' if self.processes else 'threads'}" if self.readers else "a thread"
        return f"{len(self)} examples, read by {by}"

    def rows(self, indices: np.ndarray) -> Any:
        return self.thread.call(self._rows, indices)

    def _rows(self, indices: np.ndarray) -> Any:
        size, once = self.piece(len(indices)), np.zeros(len(indices), int)
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        reads = [(self.submit(ReadRequest(part, once[: len(part)], 0, 0)), int(part[0])) for part in parts]
        return joined([self.result(*read) for read in reads])

    def submit(self, request: ReadRequest) -> Future[Any]:
        if self._processes is not None:
            return self._processes.submit(request)
        if self._threads is not None:
            return self._threads.submit(self._reader.read, request)
        return _done(self._reader.read, request)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()


class _ExampleReader:
    """A source with the functions that are applied to each of its examples."""

    def __init__(self, source: Any, transform: Any, augment: Any):
        self._source, self._transform, self._augment = source, transform, augment
        self._first: Any = None

    def first(self) -> Any:
        """Read example 0, which defines the structure, shapes and dtypes of all."""
        self._first = first_taken(self._item(0, 0, 0, 0), "data[0]")
        return self._first

    def read(self, request: ReadRequest) -> Any:
        """Return examples on the host, as a batch."""
        indices = request.indices.tolist()
        # All are read before any is converted: after a wait the caches are cold, and each function called costs more.
        items = [self._item(i, e, *request[2:]) for i, e in zip(indices, request.epochs.tolist(), strict=True)]
        rows = [taken(item, f"data[{index}]") for index, item in zip(indices, items, strict=True)]
        return stacked(
            [checked(row, self._first, f"example {index}") for index, row in zip(indices, rows, strict=True)]
        )

    def _item(self, index: int, epoch: int, seed: int, shard: int) -> Any:
        begin_read(f"example {index} of the data")
        try:
            item = self._source[index]
            if self._transform is not None:
                item = self._transform(item)
            if self._augment is not None:
                item = self._augment(item, random_numbers(index, epoch, seed, shard))
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
      num_readers: number of reader processes for each process of the program; 0 to read in threads. They start on
        demand, without running the script again.
      num_threads: how many threads of each process call `data[i]` and the functions at the same time, on the same
        objects; 1 by default, because few data sets are written for threads. Arrays without functions are read by row,
        in one go, whatever it says.
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
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def _is_mapped(column: np.ndarray) -> bool:
    base: Any = column
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    return isinstance(base, np.memmap)


def _column(leaf: Any, name: str) -> Any:
    if isinstance(leaf, np.ndarray) and _is_mapped(leaf):
        taken(np.asarray(leaf)[:1], name)  # refuses what holds no numbers
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
