"""Adapters for data of other libraries, recognized by their attributes, so that none of these is imported here.

Data with an index are read by index, loaders included: batch size, order and shuffling are the program's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from adaptive.base.arrays import is_array
from adaptive.base.errors import DataError
from adaptive.base.numbers import whole

from . import torch_loaders
from .batches import refuse_batches
from .examples import Examples, RandomAccess
from .grain_pipelines import check_has_index
from .hugging_face import HuggingFaceRows, is_hugging_face, refuse_splits
from .iterable import FromIterator, from_iterator
from .stored_arrays import arrays_of_group
from .tables import by_column
from .tensor_datasets import columns_of, has_columns


def from_source(
    data: Any,
    *,
    map: Callable[[Any], Any] | None = None,
    random_map: Callable[[Any, np.random.Generator], Any] | None = None,
    num_readers: int | None = None,
    num_threads: int | None = None,
    read_timeout: float | None = None,
) -> Examples:
    """Return data with an index for `Program`, `Shards` and `evaluate`, with functions to apply to each example.

        data = ad.data.from_source(files, map=decode, random_map=crop, num_readers=8)
        program = ad.Program(driver, state, data, global_batch=96)

    Each example is used once per epoch, in an order that the program's seed determines, even if workers or batch sizes
    change. A batch that spans the end of an epoch can hold one example twice, once for each epoch. Use this function to
    transform examples or to read them in separate processes; otherwise `Program(data=…)` takes the same data directly.

    Args:
      data: data for `Program` with an index: `data[i]`, arrays, or a data frame, which is read by column. Within
        examples, a list of numbers is an array, at any depth, and a list that holds arrays is a pytree of them; lists
        around whole arrays are pytrees.
      map: `fn(example)`, applied to each example; returns a pytree of arrays and numbers.
      random_map: `fn(example, rng)`, like `map` with random numbers. An example's `rng` depends only on the program's
        seed, the epoch and the example's index, not on which process reads it; `evaluate` uses the first epoch's.
      num_readers: number of reader processes for each process of the program; 0 to read in a thread. By default the
        `num_workers` of a given loader, else 0. Reader processes start on demand. Their code is sent by cloudpickle, so
        scripts need no `if __name__ == "__main__"`.
      num_threads: how many threads of each process call `data[i]` and the functions at the same time, on the same
        objects; 1 by default, because few data sets are written for threads. Several help where reading waits for a
        disk or a network. Arrays are read by row, in one go, whatever it says. Not together with `num_readers`.
      read_timeout: seconds after which reading one example for a waiting step fails with a DataError; 0 for no limit.
        By default 1.5 times the world's `hang_timeout`, and no limit on one process.

    Raises:
      DataError: the data cannot be used, or have no index.
    """
    if num_readers is not None and (whole(num_readers) is None or num_readers < 0):
        raise DataError(f"num_readers= must be a number of processes; got {num_readers!r}.")
    if num_threads is not None and (whole(num_threads) is None or num_threads < 1):
        raise DataError(f"num_threads= must be a number of threads, at least 1; got {num_threads!r}.")
    if num_threads is not None and num_readers:
        raise DataError("pass num_readers= (processes) or num_threads=, not both.")
    found = examples_of(
        *(data, map, random_map),
        num_readers=None if num_readers is None else int(num_readers),
        num_threads=None if num_threads is None else int(num_threads),
        read_timeout=read_timeout,
    )
    if isinstance(found, FromIterator):
        raise DataError(f"a {type(data).__name__} has no index:  ad.data.from_iterator(data, map=…)")
    return found


def examples_of(
    data: Any,
    transform: Callable[[Any], Any] | None = None,
    augment: Callable[[Any, np.random.Generator], Any] | None = None,
    *,
    num_readers: int | None = None,
    num_threads: int | None = None,
    read_timeout: float | None = None,
) -> Examples | FromIterator:
    """Return a user's data as `Examples`, or as `FromIterator` if they have no index.

    Raises:
      DataError: the data cannot be used, or are ambiguous.
    """
    if isinstance(data, Examples | FromIterator):
        if transform or augment or num_readers or num_threads or read_timeout is not None:
            raise DataError(
                f"{data!r}: pass map=, random_map=, num_readers=, num_threads= and read_timeout= in one call."
            )
        return data
    if isinstance(data, type):
        raise DataError(f"data is the class {data.__name__}, not a data set. Create one:  {data.__name__}(…)")
    refuse_splits(data)
    data = by_column(data)
    notes: tuple[str, ...] = ()
    one_by_one: Callable[[Any], Any] | None = None
    if torch_loaders.is_loader(data):
        if torch_loaders.is_iterable_dataset(data.dataset):
            return from_iterator(data, batched=torch_loaders.gives_batches(data))
        one_by_one = torch_loaders.collate_function(data)
        transform = _Both(one_by_one, transform) if one_by_one and transform else one_by_one or transform
        in_memory = has_columns(data.dataset) and not (transform or augment or num_readers)
        if num_readers is None:
            num_readers = 0 if in_memory or num_threads is not None else data.num_workers
        notes = (torch_loaders.note_of_loader(data, num_readers, in_memory),)
        data = data.dataset
    data = arrays_of_group(data)
    if has_columns(data) and not (transform or augment or num_readers):  # functions receive the data set's own items
        data = columns_of(data)
    if _has_no_index(data):
        return from_iterator(data)
    refuse_batches(data)
    check_has_index(data)
    if is_hugging_face(data) and one_by_one is None:  # a loader's collate_fn receives the data set's own items
        data = HuggingFaceRows(data, strict=not (transform or augment))
    return Examples(
        data,
        transform=transform,
        augment=augment,
        num_readers=num_readers or 0,
        num_threads=num_threads or 1,
        notes=notes,
        read_timeout=read_timeout,
    )


def _has_no_index(data: Any) -> bool:
    """Return whether data can only be iterated, and not indexed.

    Raises:
      DataError: the data are a set, an iterator, which can be iterated only once, or a function.
    """
    if isinstance(data, set | frozenset):
        raise DataError("a set has no order. Pass a list:  sorted(data)")
    if isinstance(data, str | bytes) or is_array(data) or not jax.tree_util.all_leaves([data]):
        return False
    if hasattr(data, "__next__"):
        from_iterator(data)  # raises, with advice
    if callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__"):
        raise DataError(f"data is a function. If it returns an iterator:  ad.data.from_iterator({_name(data)})")
    return (hasattr(data, "__iter__") and not isinstance(data, RandomAccess)) or torch_loaders.is_iterable_dataset(data)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "make")


class _Both:
    """The composition of two functions: `second(first(example))`."""

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], Any]):
        self._first, self._second = first, second

    def __call__(self, example: Any) -> Any:
        return self._second(self._first(example))
