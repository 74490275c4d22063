"""What other libraries call data: recognised by what it has, so that none of them is imported here.

Whatever has an index is taken by its index, loaders too: their batch size, sampler and shuffling are the program's.
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
    read_timeout: float | None = None,
) -> Examples:
    """Data with an index, for `Program`'s `data`, `Shards` and `evaluate`, and what is done to each example.

        data = ad.data.from_source(files, map=decode, random_map=crop, num_readers=8)
        program = ad.Program(driver, state, data, global_batch=96)

    Each example comes once per epoch, in an order of the program's seed, whatever is resized. A batch that spans the
    end of an epoch can hold one example twice, once for each epoch. Needed where examples are transformed, or read by
    processes of their own; otherwise `Program(data=…)` takes the same data as they are.

    Args:
      data: as for `Program`, if it has an index: `data[i]`, arrays, or a data frame, which is taken by column. In
        examples a list of numbers is an array, at any depth, and a list that holds arrays a pytree of them; lists in
        arrays that are given whole are pytrees.
      map: what an example becomes: `fn(example)`, a pytree of arrays and numbers.
      random_map: the same with random numbers: `fn(example, rng)`. An example's `rng` depends on the program's seed,
        the epoch and the example's number alone, and not on who reads it; in `evaluate` it is always the first epoch's.
      num_readers: processes that read, for each process of the program; 0 to read in a thread. By default as many as a
        loader that is given has, or none. They are started when they are needed. What they run is sent to them by
        cloudpickle, so scripts need no `if __name__ == "__main__"`.
      read_timeout: seconds after which reading one example fails with a DataError, where a step waits for it; 0 for no
        limit. By default 1.5 times the world's `hang_timeout`, and no limit on one process.

    Raises:
      DataError: the data cannot be used, or have no index.
    """
    if num_readers is not None:
        if whole(num_readers) is None or num_readers < 0:
            raise DataError(f"num_readers= takes how many processes read; got {num_readers!r}.")
        num_readers = int(num_readers)
    found = examples_of(data, transform=map, augment=random_map, num_readers=num_readers, read_timeout=read_timeout)
    if isinstance(found, FromIterator):
        raise DataError(f"a {type(data).__name__} has no index:  ad.data.from_iterator(data, map=…)")
    return found


def examples_of(
    data: Any,
    *,
    transform: Callable[[Any], Any] | None = None,
    augment: Callable[[Any, np.random.Generator], Any] | None = None,
    num_readers: int | None = None,
    read_timeout: float | None = None,
) -> Examples | FromIterator:
    """What a user gave as data, taken for what it is.

    Raises:
      DataError: it cannot be used, or it cannot be told what is meant.
    """
    if isinstance(data, Examples | FromIterator):
        if transform or augment or num_readers or read_timeout is not None:
            raise DataError(f"{data!r}: give map=, random_map=, num_readers= and read_timeout= in one call.")
        return data
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
        num_readers = (0 if in_memory else data.num_workers) if num_readers is None else num_readers
        notes = (torch_loaders.note_of_loader(data, num_readers, in_memory),)
        data = data.dataset
    data = arrays_of_group(data)
    if has_columns(data) and not (transform or augment or num_readers):  # functions are given the data set's own items
        data = columns_of(data)
    if _has_no_index(data):
        return from_iterator(data)
    refuse_batches(data)
    check_has_index(data)
    if is_hugging_face(data) and one_by_one is None:  # a loader's own function is called with what it knows
        data = HuggingFaceRows(data, strict=not (transform or augment))
    return Examples(
        data, transform=transform, augment=augment, num_readers=num_readers or 0, notes=notes, read_timeout=read_timeout
    )


def _has_no_index(data: Any) -> bool:
    """Whether it can be iterated, and no more.

    Raises:
      DataError: once only, or it is not known how.
    """
    if isinstance(data, set | frozenset):
        raise DataError("a set has no order. Give a list:  sorted(data)")
    if isinstance(data, str | bytes) or is_array(data) or not jax.tree_util.all_leaves([data]):
        return False
    if hasattr(data, "__next__"):
        from_iterator(data)  # says what to write
    if callable(data) and not hasattr(data, "__getitem__") and not hasattr(data, "__iter__"):
        raise DataError(f"data is a function. If it begins an iterator:  ad.data.from_iterator({_name(data)})")
    return (hasattr(data, "__iter__") and not isinstance(data, RandomAccess)) or torch_loaders.is_iterable_dataset(data)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "make")


class _Both:
    """One function after another."""

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], Any]):
        self._first, self._second = first, second

    def __call__(self, example: Any) -> Any:
        return self._second(self._first(example))
