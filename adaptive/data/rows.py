"""Data with an index: a pytree of arrays with a row per example; a source, whose `data[i]` is one example; shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import repeat
from operator import getitem
from typing import Any, NamedTuple

import jax
import numpy as np

from adaptive.base.errors import DataError
from adaptive.base.values.arrays import NotAnArrayError, as_numpy, is_array, is_sparse, on_host
from adaptive.base.values.numbers import whole
from adaptive.base.values.torch_tensors import is_tensor
from adaptive.base.values.tree_paths import leaf_names

from .advice import refuse_foreign
from .example import Functions, batch_of, checked, first_taken, joined, taken
from .readers import ReaderProcesses, Readers, ReaderThreads, begin_read

_ENDLESS = 2**62  # from this length on, data repeat without end; grain returns 2**63 - 1 for them
# A reader process reads a whole batch at a time, as PyTorch's do, in 0.86 to 0.96 of the time of equal parts. Of large
# examples it reads so many bytes, or its equal part of the batch if that is more.
_LARGEST_PIECE, _PIECE_BYTES = 256, 4 << 20


class PositionSpan(NamedTuple):
    """Positions of a shard that are taken in one step: by one worker, or by all workers of a process."""

    shard: int
    start: int
    examples: int


class Data:
    """Training data; an abstract class."""

    example: Any  # one of them, on the host
    lengths: tuple[int, ...]  # the number of examples that all workers share, or of each worker's own
    in_memory = False  # whether examples are rows of arrays in memory
    no_epochs = ""  # why the epochs are unknown; "" if they are known
    notes: tuple[str, ...] = ()  # for the user, on how the data are read

    def __len__(self) -> int:
        return sum(self.lengths)

    def shapes(self, examples: int) -> Any:
        """Return a batch of this many examples, as `jax.ShapeDtypeStruct`s."""
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((examples, *a.shape), jax.dtypes.canonicalize_dtype(a.dtype)), self.example
        )

    def epochs(self, cursors: Sequence[int]) -> tuple[float, int | None]:
        """Return the number of epochs consumed, and their length; `None` if it is unknown. Replicated."""
        return sum(cursors) / len(self), len(self)

    def close(self) -> None:
        """End iterators and reader processes, without waiting for a read. Processes start again on demand."""


class Rows(Data):
    """A data set that is read by index; an abstract class."""

    by_row = False  # whether rows are taken from arrays, without user code
    readers: Readers

    @property
    def shards(self) -> Sequence[Rows]:
        """The data sets of the workers, or the one that they share."""
        return (self,)

    def rows(self, indices: np.ndarray) -> Any:
        """Return the examples at these indices, in their first epoch, as a batch; leaves of shape=(len(indices), …)."""
        raise NotImplementedError

    def submit(self, indices: np.ndarray, epochs: np.ndarray, seed: int, shard: int) -> Future[Any]:
        """Start to read the examples at these indices as a batch; the other arguments are of their random numbers."""
        del epochs, seed, shard
        return self.readers.submit(self.rows, indices)

    def result(self, read: Future[Any], index: int) -> Any:
        """Wait for a batch whose first example has this index; see `Readers.result`."""
        return self.readers.result(read, f"example {index} of the data")

    def piece(self, examples: int) -> int:
        """Return the number of examples that a reader reads at a time, of a batch of this many."""
        return max(1, examples)

    def close(self) -> None:
        self.readers.close()


class ArrayRows(Rows):
    """A pytree of arrays with a common leading axis. Memory-mapped arrays stay on disk, in their own width."""

    by_row = True

    def __init__(self, data: Any):
        leaves, self._tree = jax.tree.flatten(data)
        names = leaf_names(data, "data")
        for name, leaf in zip(names, leaves, strict=True):
            refuse_foreign(leaf, name)
        self._columns = [_column(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
        self.lengths = (_common_length(data, names, self._columns),)
        self.in_memory, self.readers = not any(map(_is_mapped, self._columns)), ReaderThreads()
        self.example = taken(self._tree.unflatten([column[0] for column in self._columns]), "data[0]")

    def __repr__(self) -> str:
        return f"{len(self)} examples"

    def rows(self, indices: np.ndarray) -> Any:
        rows = self._tree.unflatten(map(getitem, self._columns, repeat(indices)))  # in C: on the path of every step
        return rows if self.in_memory else taken(rows, "data", indices)


class SourceRows(Rows):
    """A source, read by threads or processes; arguments as for `from_source`. Raises a DataError if it is empty."""

    def __init__(
        self, source: Any, functions: Functions, num_readers: int, num_threads: int, read_timeout: float | None
    ):
        length = len(source)
        if length == 0:
            raise DataError("the data set is empty: len(data) is 0.")
        if length >= _ENDLESS:
            raise DataError(
                f"len(data) is {length}: the data are repeated without end. Leave out .repeat(), because the "
                "program repeats the data in every epoch."
            )
        self.lengths = (length,)
        self._reader, threads = _ExampleReader(source, functions), ReaderThreads(num_threads, read_timeout)
        self.example = threads.call(self._reader.first)
        self._row_bytes = max(1, sum(leaf.nbytes for leaf in jax.tree.leaves(self.example)))
        self.readers = ReaderProcesses(num_readers, read_timeout) if num_readers else threads
        self.notes = (f"data with an index: {self!r}, each once per epoch",)

    def __repr__(self) -> str:
        number = self.readers.number
        kind = "processes" if isinstance(self.readers, ReaderProcesses) else "threads"
        by = "a thread" if (number, kind) == (1, "threads") else f"{number} {kind}"
        return f"{len(self)} examples, read by {by}"

    def rows(self, indices: np.ndarray) -> Any:
        size, once = self.piece(len(indices)), np.zeros(len(indices), int)
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        reads = [(self.submit(part, once[: len(part)], 0, 0), int(part[0])) for part in parts]
        return joined([self.result(*read) for read in reads])

    def submit(self, indices: np.ndarray, epochs: np.ndarray, seed: int, shard: int) -> Future[Any]:
        return self.readers.submit(self._reader.read, indices, epochs, seed, shard)

    def piece(self, examples: int) -> int:
        if isinstance(self.readers, ReaderProcesses):
            part, few = -(-examples // self.readers.number), _PIECE_BYTES // self._row_bytes
            return max(1, min(max(part, few), examples, _LARGEST_PIECE))
        return 1 if self.readers.number > 1 else max(1, examples)


class _ExampleReader:
    """A source with the functions that are applied to each of its examples."""

    def __init__(self, source: Any, functions: Functions):
        self._source, self._functions, self._first = source, functions, None

    def first(self) -> Any:
        """Read example 0, which all others must look like."""
        self._first = first_taken(self._item(0, 0, 0, 0), "data[0]")
        return self._first

    def read(self, indices: np.ndarray, epochs: np.ndarray, seed: int, shard: int) -> Any:
        each = indices.tolist()
        items = [self._item(i, epoch, seed, shard) for i, epoch in zip(each, epochs.tolist(), strict=True)]
        return batch_of(items, each, self._first)

    def _item(self, index: int, epoch: int, seed: int, shard: int) -> Any:
        begin_read(f"example {index} of the data")
        try:
            return self._functions.applied(self._source[index], index, epoch, seed, shard)
        except Exception as error:
            error.add_note(f"in reading example {index} of the data, a {type(self._source).__name__}")
            raise


class _RowsOfArrays:
    """A source of the rows of arrays, for functions of an example. The rows are copies, which functions may change."""

    def __init__(self, arrays: Any):
        # Not as they are: the index of a pandas Series is a label, and not a position.
        self._arrays = jax.tree.map(lambda x: x if is_tensor(x) else as_numpy(x), arrays)

    def __len__(self) -> int:
        return len(jax.tree.leaves(self._arrays)[0])

    def __getitem__(self, index: int) -> Any:
        return jax.tree.map(lambda x: x[index].clone() if is_tensor(x) else x[index].copy(), self._arrays)


class Shards(Rows):
    """One data set per worker, for `Program`'s `data`.

        program = ad.Program(driver, state, ad.Shards([data_0, data_1, data_2]), global_batch=96)

    Worker i takes its examples from shard i, in a new order for each epoch of the *shard*: each example once per shard
    epoch, even if batch sizes change. A worker with a larger batch has more shard epochs. An epoch of the program is as
    many examples as all shards hold. Every process receives all shards and reads its workers'. `evaluate` treats the
    shards, one after another, as one data set.

    Args:
      data_sets: one data set per worker, in the workers' order, as for `Program`. All examples must have the same
        structure, shapes and dtypes.
    Raises:
      DataError: no data sets, an empty one, or examples that differ in structure, shape or dtype.
    """

    def __init__(self, data_sets: Iterable[Any]):
        if isinstance(data_sets, str | Mapping) or hasattr(data_sets, "shape"):
            raise DataError(f"Shards takes a list of data sets, one per worker; got a {type(data_sets).__name__}.")
        shards: list[Rows] = []
        for number, data in enumerate(data_sets):
            try:
                shards.append(rows_of(data))
            except DataError as error:
                raise DataError(f"shard {number}: {error}") from None
            checked(shards[-1].example, shards[0].example, f"shard {number}", "shard 0")
        if not shards:
            raise DataError("Shards takes one data set per worker; got none.")
        self._shards, self.example, self.lengths = shards, shards[0].example, tuple(map(len, shards))
        self.by_row = all(shard.by_row for shard in shards)
        self.in_memory = all(shard.in_memory for shard in shards)
        self.readers = max((shard.readers for shard in shards), key=lambda readers: readers.number)

    def __repr__(self) -> str:
        return f"Shards of {' + '.join(map(str, self.lengths))} examples"

    @property
    def shards(self) -> Sequence[Rows]:
        """The data sets, in the workers' order."""
        return self._shards

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def rows(self, indices: np.ndarray) -> Any:
        """Return examples of the concatenated shards as a batch; `indices` ascend."""
        starts = np.cumsum([0, *self.lengths[:-1]])
        each = zip(self._shards, np.split(indices, np.searchsorted(indices, starts[1:])), starts, strict=True)
        return joined([shard.rows(part - start) for shard, part, start in each if len(part)])


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
    change. Without functions and readers, pass the data to `Program` directly.

    Args:
      data: a pytree of arrays with a row per example, or an object with `len(data)` and `data[i]`.
      map: `fn(example)`, applied to each example; returns a pytree of arrays and numbers.
      random_map: `fn(example, rng)`, like `map`. The random numbers depend only on the program's seed, the epoch and
        the index; `evaluate` uses the first epoch's.
      num_readers: reader processes for each process of the program; 0 to read in threads. They start on demand, without
        running the script again.
      num_threads: threads of each process that call `data[i]` and the functions at the same time, on the same objects.
        Few data sets are written for several.
      read_timeout: seconds after which one read for a waiting step fails with a DataError; 0 for no limit. By default
        1.5 times the world's `hang_timeout`, and no limit on one process.

    Raises:
      DataError: the data cannot be used, or have no index; says the line to write instead.
    """
    for name, number, least in (("num_readers", num_readers, 0), ("num_threads", num_threads, 1)):
        if whole(number) is None or number < least:
            raise DataError(f"{name}= must be a whole number, at least {least}; got {number!r}.")
    if num_threads > 1 and num_readers:
        raise DataError("pass num_readers= (processes) or num_threads=, not both.")
    if isinstance(data, Rows):
        raise DataError(f"{data!r}: pass map=, random_map=, num_readers=, num_threads= and read_timeout= in one call.")
    if not _is_source(data):
        arrays = ArrayRows(data)
        if map is None and random_map is None:
            return arrays
        data = _RowsOfArrays(data)
    return SourceRows(data, Functions(map, random_map), int(num_readers), int(num_threads), read_timeout)


def rows_of(data: Any) -> Rows:
    """Return a user's data with an index as rows. Raises a DataError that says the line to write if that cannot be."""
    return data if isinstance(data, Rows) else from_source(data)


def _is_source(data: Any) -> bool:
    """Return whether data are read one by one, as `data[i]`. Raises with advice for other libraries' types."""
    refuse_foreign(data)
    for path, leaf in jax.tree_util.tree_leaves_with_path(data, is_leaf=is_sparse):
        if is_sparse(leaf):  # JAX's are pytrees, whose leaves have a row for each number
            try:
                on_host(leaf)
            except NotAnArrayError as error:
                raise DataError(error.about(f"data{jax.tree_util.keystr(path)}")) from None
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
    """Return the number of examples. Raises a DataError if leaves have none, or others."""
    if not columns:
        raise DataError(f"the data set has no arrays: {data!r}. Pass a pytree of arrays with one leading axis.")
    for name, column in zip(names, columns, strict=True):
        if column.ndim == 0:
            raise DataError(
                f"{name} is a single number; every leaf needs a leading axis, one row per example. JAX takes a Python "
                "list for a pytree of its items: write np.asarray(x) for a list of numbers."
            )
    lengths = dict(zip(names, map(len, columns), strict=True))
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"the data set's leaves have different numbers of examples: {lengths}. If these are examples, stack them:  "
            "jax.tree.map(lambda *xs: np.stack(xs), *data)"
        )
    if not len(columns[0]):
        raise DataError(f"the data set is empty: {names[0]} has shape {columns[0].shape}.")
    return len(columns[0])
