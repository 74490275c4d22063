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

from .examples import Examples, RandomAccess
from .iterated import FromIterator, from_iterator, module_of, refuse_batches


def from_source(
    data: Any,
    *,
    map: Callable[[Any], Any] | None = None,
    random_map: Callable[[Any, np.random.Generator], Any] | None = None,
    workers: int | None = None,
) -> Examples:
    """Data with an index, for `Program`'s `data`, `Shards` and `evaluate`, and what is done to each example.

        data = ad.data.from_source(files, map=decode, random_map=crop, workers=8)
        program = ad.Program(driver, state, data, global_batch=96)

    Each example comes once per epoch, in an order of the program's seed, whatever is resized. A batch that spans the
    end of an epoch can hold one example twice, once for each epoch. Needed where examples are transformed, or read by
    processes of their own; otherwise `Program(data=…)` takes the same data as they are.

    Args:
      data: as for `Program`, if it has an index: `data[i]` or arrays.
      map: what an example becomes: `fn(example)`, a pytree of arrays and numbers.
      random_map: the same with random numbers: `fn(example, rng)`. An example's `rng` depends on the program's seed,
        the epoch and the example's number alone, and not on who reads it; in `evaluate` it is always the first epoch's.
      workers: processes that read, for each process of the program; 0 to read in a thread. By default as many as a
        loader that is given has, or none. They are started when they are needed. What they run is sent to them by
        cloudpickle, so scripts need no `if __name__ == "__main__"`.

    Raises:
      DataError: the data cannot be used, or have no index.
    """
    if workers is not None and (whole(workers) is None or workers < 0):
        raise DataError(f"workers= takes how many processes read; got {workers!r}.")
    found = examples_of(data, transform=map, augment=random_map, workers=None if workers is None else int(workers))
    if isinstance(found, FromIterator):
        raise DataError(f"a {type(data).__name__} has no index:  ad.data.from_iterator(data, map=…)")
    return found


def examples_of(
    data: Any,
    *,
    transform: Callable[[Any], Any] | None = None,
    augment: Callable[[Any, np.random.Generator], Any] | None = None,
    workers: int | None = None,
) -> Examples | FromIterator:
    """What a user gave as data, taken for what it is.

    Raises:
      DataError: it cannot be used, or it cannot be told what is meant.
    """
    if isinstance(data, Examples | FromIterator):
        if transform or augment or workers:
            raise DataError(f"{data!r}: give map=, random_map= and workers= in one call.")
        return data
    notes: tuple[str, ...] = ()
    if _is_torch_loader(data):
        if _is_iterable_dataset(data.dataset):
            return from_iterator(data, batched=data.batch_size is not None)
        one_by_one = _collate(data)
        transform = _Both(one_by_one, transform) if one_by_one and transform else one_by_one or transform
        workers = data.num_workers if workers is None else workers
        notes = (_note_of_loader(data, workers),)
        data = data.dataset
    if _has_no_index(data):
        return from_iterator(data)
    refuse_batches(data)
    if (
        module_of(data) == "datasets"
        and hasattr(data, "with_format")
        and getattr(data, "format", {}).get("type") is None
    ):
        data = data.with_format("numpy")
    return Examples(data, transform=transform, augment=augment, workers=workers or 0, notes=notes)


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def _is_torch_loader(data: Any) -> bool:
    return all(hasattr(data, name) for name in ("dataset", "batch_size", "sampler", "collate_fn", "num_workers"))


def _is_iterable_dataset(data: Any) -> bool:
    """PyTorch's, which inherit a `__getitem__` that only raises."""
    return any(c.__name__ == "IterableDataset" and c.__module__.startswith("torch.") for c in type(data).__mro__)


_OURS = {"SequentialSampler", "RandomSampler", "DistributedSampler"}  # that say in which order, and not which examples


def _collate(loader: Any) -> Callable[[Any], Any] | None:
    """What a loader does to each example, if it is something that a loader of single examples would do.

    Raises:
      DataError: its sampler means something that the program's order does not.
    """
    batches = getattr(loader, "batch_sampler", None)
    if batches is not None and type(batches).__name__ != "BatchSampler":
        raise _other_order("batch_sampler", batches)
    sampler = loader.sampler
    picks = getattr(sampler, "replacement", False) or getattr(sampler, "num_samples", None) not in (
        None,
        len(loader.dataset),
    )
    if type(sampler).__name__ not in _OURS or (picks and type(sampler).__name__ == "RandomSampler"):
        raise _other_order("sampler", sampler)
    name = getattr(loader.collate_fn, "__name__", "")
    return None if name in ("default_collate", "default_convert") else _OneByOne(loader.collate_fn)


def _other_order(what: str, sampler: Any) -> DataError:
    return DataError(
        f"the DataLoader's {what} is a {type(sampler).__name__}, which picks examples; the program takes each once "
        "per epoch. Give the data set, of those examples (torch.utils.data.Subset); or, to keep the loader's order and "
        "lose its index:  ad.data.from_iterator(loader, batched=True)"
    )


def _note_of_loader(loader: Any, workers: int) -> str:
    read = f"read by {workers} processes" if workers else "read in a thread (workers= of from_source, or num_workers=)"
    collate = (
        "" if getattr(loader.collate_fn, "__name__", "").startswith("default_") else ", its collate_fn for each alone"
    )
    return (
        f"of the {type(loader).__name__} its data set is taken, by index, {read}{collate}. Batches, their sizes and "
        f"the order of examples are this program's: batch_size={loader.batch_size}, shuffling and drop_last go unused."
    )


class _OneByOne:
    """A collate function, of one example."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate

    def __call__(self, example: Any) -> Any:
        batch = jax.tree.map(np.asarray, self._collate([example]))
        for leaf in jax.tree.leaves(batch):
            if leaf.shape[:1] != (1,):
                raise DataError(
                    f"the DataLoader's collate_fn makes an array of shape {leaf.shape} of one example; each array must "
                    "have a leading axis of examples. Give its data set, and do the rest in  ad.data.from_source(map=…)"
                )
        return jax.tree.map(lambda leaf: leaf[0], batch)


class _Both:
    """One function after another."""

    def __init__(self, first: Callable[[Any], Any], second: Callable[[Any], Any]):
        self._first, self._second = first, second

    def __call__(self, example: Any) -> Any:
        return self._second(self._first(example))


# --- grain, and whatever is iterated ----------------------------------------------------------------------------------


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
    return (hasattr(data, "__iter__") and not isinstance(data, RandomAccess)) or _is_iterable_dataset(data)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "make")
