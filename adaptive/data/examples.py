"""A data set with an index: arrays with a row per example, a source of examples, or a list of examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from itertools import repeat
from operator import getitem
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from adaptive.base.arrays import NotAnArrayError, is_array, on_host
from adaptive.base.errors import DataError
from adaptive.base.tree_paths import leaf_names

from .fetch_thread import FetchThread
from .lists_of_examples import advice_on_lists, stack_list
from .one_example import narrowing_notes, taken
from .pool import Pool
from .read_watch import CurrentRead, checked_timeout, read_in_background
from .reading import FIRST_PASS, ExampleReader, Passes, RowsOfArrays
from .stored_arrays import StoredArray, is_mapped, is_stored

_ENDLESS = 2**62  # from this length on, data repeat without end; grain returns 2**63 - 1 for them
_SHOWN = 8  # leaves of a data set that an error lists


@runtime_checkable
class RandomAccess(Protocol):
    """A grain-like source: `source[i]` is one example, a pytree of arrays and numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class ShardRange(NamedTuple):
    """The rows of a shard within the whole data set: `length` rows from index `start` on."""

    start: int
    length: int


class Rows(Protocol):
    """A data set whose rows the program reads by index: `Examples`, or `Shards` of several."""

    length: int
    example: Any  # one row, on the host
    shard_ranges: tuple[ShardRange, ...]  # one range that all workers share, or one range per worker

    @property
    def in_memory(self) -> bool:
        """Whether rows are read from arrays, without user code."""
        ...

    @property
    def mapped(self) -> bool:
        """Whether some of the arrays are mapped files, whose rows are read from disk."""
        ...

    @property
    def num_readers(self) -> int:
        """Number of reader processes; 0 if this process reads rows itself."""
        ...

    @property
    def readers(self) -> str:
        """Who reads, in words: "a thread", "4 threads", "2 processes"."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how the data were interpreted."""
        ...

    def __len__(self) -> int: ...

    def rows(self, indices: np.ndarray, passes: Passes = FIRST_PASS) -> Any:
        """Return the examples at these indices as a batch; leaves of shape=(len(indices), …)."""
        ...

    def submit(self, indices: np.ndarray, passes: Passes) -> Future[Any]:
        """Start to read the examples at these indices, all of one shard, in a reader process if there is one."""
        ...

    def shapes(self, examples: int) -> Any:
        """Return a batch of this many examples, as `jax.ShapeDtypeStruct`s."""
        ...

    @property
    def read_timeout(self) -> float | None:
        """Seconds after which reading one example fails; `None` for the default, 0 for no limit."""
        ...

    @property
    def thread(self) -> FetchThread:
        """The one thread that reads the data or waits for reader processes, so that sources need no locks."""
        ...

    def current_reads(self) -> list[CurrentRead]:
        """Return the reads in progress, by threads of this process or by reader processes."""
        ...

    def abandon(self) -> None:
        """End the reader processes, one of which hangs; they start again on demand."""
        ...

    def close(self) -> None:
        """End the reader processes; they start again on demand."""
        ...


class Examples:
    """A data set with rows by index.

    Args:
      data: a pytree of arrays with a common leading axis; or a `RandomAccess` source; or a list of examples of one
        structure, which are stacked. Dicts in a list are examples; any other list that might also be a pytree of arrays
        is an error; a tuple is always a pytree.
      transform: function of an example.
      augment: function of an example and its random generator.
      num_readers: number of reader processes.
      num_threads: number of threads that read at the same time, in this process.
      notes: notes for the user on how the data were interpreted.
      read_timeout: seconds after which reading one example fails; `None` for the default, 0 for no limit.

    Raises:
      DataError: leaves of different lengths, no leaves, no examples, leaves that hold no numbers, or an ambiguous list
        or object.
    """

    def __init__(
        self,
        data: Any,
        *,
        transform: Callable[[Any], Any] | None = None,
        augment: Callable[[Any, np.random.Generator], Any] | None = None,
        num_readers: int = 0,
        num_threads: int = 1,
        notes: tuple[str, ...] = (),
        read_timeout: float | None = None,
    ):
        self.mapped, self.notes, self.num_readers, self.num_threads = False, notes, num_readers, num_threads
        self.read_timeout, self.thread = checked_timeout(read_timeout), FetchThread("adaptive-input")
        self._reading: ExampleReader | None = None
        if _is_source(data):
            self.length = len(data)
            if self.length == 0:
                raise DataError("the data set is empty: len(data) is 0.")
            if self.length >= _ENDLESS:
                raise DataError(
                    f"len(data) is {self.length}: the data are repeated without end. Leave out .repeat(), because the "
                    "program repeats the data in every epoch. To keep an endless order of your own:  "
                    "ad.data.from_iterator(lambda: (data[i] for i in itertools.count()))"
                )
            self._reading = ExampleReader(data, transform, augment, num_threads)
        else:
            given, narrowing = stack_list(data)
            arrays = _columns(given)
            self.notes += narrowing or narrowing_notes(given, "data")
            self.length = _check_columns(data, arrays)
            self._columns, self._tree = jax.tree.flatten(arrays)
            self.mapped = any(map(is_mapped, self._columns))
            if transform or augment or num_readers or any(isinstance(c, StoredArray) for c in self._columns):
                rows = RowsOfArrays(self._columns, self._tree)
                self._reading = ExampleReader(rows, transform, augment, num_threads)
        self._pool = Pool(self._reading, num_readers) if self._reading and num_readers else None
        if self._reading is None:
            self.example = jax.tree.map(lambda a: on_host(a[0]), arrays)
        else:
            self.example = read_in_background(self, self._reading.first)
            self.notes += self._reading.narrowing
        self.shard_ranges: tuple[ShardRange, ...] = (ShardRange(0, self.length),)

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"{self.length} examples" + ("" if self.in_memory else f", read by {self.readers}")

    @property
    def in_memory(self) -> bool:
        return self._reading is None

    @property
    def readers(self) -> str:
        """Who reads, in words: "a thread", "4 threads", "2 processes"."""
        if self.num_readers:
            return f"{self.num_readers} processes"
        return "a thread" if self.num_threads == 1 else f"{self.num_threads} threads"

    def rows(self, indices: np.ndarray, passes: Passes = FIRST_PASS) -> Any:
        """Return the examples at these indices as a batch; leaves of shape=(len(indices), …)."""
        if self._reading is None:
            rows = list(map(getitem, self._columns, repeat(indices)))  # runs in C: this is on the path of every step
            return self._on_host(rows, indices) if self.mapped else self._tree.unflatten(rows)
        if self._pool is None:
            return self._reading.rows(indices, passes)
        return self._pool.rows(indices, passes)

    def _on_host(self, rows: list[Any], indices: np.ndarray) -> Any:
        """Return rows of mapped files in the width that JAX computes with."""
        try:
            return self._tree.unflatten(map(on_host, rows))
        except NotAnArrayError:
            for name, leaf in zip(leaf_names(self._tree.unflatten(rows), "data"), rows, strict=True):
                try:
                    on_host(leaf)
                except NotAnArrayError as error:
                    raise DataError(error.about(name, indices)) from error
            raise

    def submit(self, indices: np.ndarray, passes: Passes) -> Future[Any]:
        """Start to read the examples at these indices, in a reader process if there is one."""
        if self._pool is not None:
            return self._pool.submit(indices, passes)
        read: Future[Any] = Future()
        read.set_result(self.rows(indices, passes))
        return read

    def shapes(self, examples: int) -> Any:
        """Return a batch of this many examples, as `jax.ShapeDtypeStruct`s."""
        return shapes_of(self.example, examples)

    def current_reads(self) -> list[CurrentRead]:
        """Return the reads in progress, by threads of this process or by reader processes."""
        reads = [] if self._reading is None else self._reading.reads.now()
        return reads or (self._pool.current_reads() if self._pool is not None else [])

    def abandon(self) -> None:
        """End the reader processes, one of which hangs; they start again on demand."""
        self.close()

    def close(self) -> None:
        """End the reader processes and threads; they start again on demand."""
        if self._pool is not None:
            self._pool.close()
        if self._reading is not None:
            self._reading.close()


def shapes_of(example: Any, examples: int) -> Any:
    """Return a batch of this many examples that look like `example`, as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((examples, *a.shape), jax.dtypes.canonicalize_dtype(a.dtype)), example
    )


# --- interpreting the data --------------------------------------------------------------------------------------------


def _is_source(data: Any) -> bool:
    """Return whether rows are read one by one, as `data[i]`."""
    if isinstance(data, list | tuple) or is_array(data):
        return False
    known = not jax.tree_util.all_leaves([data])  # whether JAX knows the type as a pytree
    if isinstance(data, Mapping):
        if not known:
            raise DataError(f"data is a {type(data).__name__}, which JAX takes for a single leaf. Pass dict(data).")
        return False
    return isinstance(data, RandomAccess) and not (known and _rows_are_of_columns(data))


def _rows_are_of_columns(data: Any) -> bool:
    """Return whether an object that is both a source and a pytree of arrays is to be read as a pytree.

    Raises:
      DataError: the source and the arrays have different examples.
    """
    arrays = taken(data, "data")
    shapes = [a.shape for a in jax.tree.leaves(arrays)]
    if not shapes or any(s[:1] != (len(data),) for s in shapes):
        return False
    for index in {0, len(data) - 1} if len(data) else ():
        row, other = jax.tree.map(lambda a, i=index: a[i], arrays), taken(data[index], f"data[{index}]")
        if jax.tree.structure(row) != jax.tree.structure(other) or not jax.tree.all(
            jax.tree.map(np.array_equal, row, other)
        ):
            raise DataError(
                f"data is a {type(data).__name__}, a pytree of arrays and a source at once, and its data[{index}] is "
                "not a row of the arrays. Pass one of the two:\n"
                "    vars(data)                                 its arrays, with a row per example\n"
                "    [data[i] for i in range(len(data))]        its examples, read once"
            )
    return True


def _columns(data: Any) -> Any:
    """Return all leaves on the host. Mapped files and arrays of HDF5 and zarr stay on disk, in their own width."""
    leaves, tree = jax.tree.flatten(data)
    return tree.unflatten(map(_column, leaves, leaf_names(data, "data")))


def _column(leaf: Any, name: str) -> Any:
    if is_stored(leaf):
        return StoredArray(leaf, name)
    if is_mapped(leaf):
        taken(np.asarray(leaf)[:1], name)
        return np.asarray(leaf)
    return taken(leaf, name)


def _check_columns(data: Any, arrays: Any) -> int:
    """Return the number of examples, after checking that all leaves have it.

    Raises:
      DataError: no leaves, a leaf without axes, leaves of different lengths, or no examples.
    """
    names, leaves = leaf_names(arrays, "data"), jax.tree.leaves(arrays)
    if not leaves:
        raise DataError(f"the data set has no arrays: {arrays!r}. Pass a pytree of arrays with one leading axis.")
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.ndim == 0:
            raise DataError(
                f"{name} is a single number; every leaf needs a leading axis, one row per example."
                + advice_on_lists(data)
            )
    lengths = [leaf.shape[0] for leaf in leaves]
    if len(set(lengths)) > 1:
        odd = next(i for i, length in enumerate(lengths) if length != lengths[0])
        shown = sorted({*range(min(_SHOWN, len(names))), odd})
        listed = ", ".join(f"{names[i]}: {lengths[i]}" for i in shown) + ", …" * (len(shown) < len(names))
        raise DataError(f"the data set's leaves have different numbers of examples: {listed}.{advice_on_lists(data)}")
    if lengths[0] == 0:
        raise DataError(f"the data set is empty: {names[0]} has shape {leaves[0].shape}.")
    return lengths[0]
