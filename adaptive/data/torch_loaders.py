"""PyTorch's loaders and data sets, recognised by what they have, so that torch is not imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import DataError


def is_loader(data: Any) -> bool:
    return all(hasattr(data, name) for name in ("dataset", "batch_size", "sampler", "collate_fn", "num_workers"))


def is_iterable_dataset(data: Any) -> bool:
    """PyTorch's, which inherit a `__getitem__` that only raises."""
    return any(c.__name__ == "IterableDataset" and c.__module__.startswith("torch.") for c in type(data).__mro__)


_OURS = {"SequentialSampler", "RandomSampler", "DistributedSampler"}  # that say in which order, and not which examples


def collate_function(loader: Any) -> Callable[[Any], Any] | None:
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


def note_of_loader(loader: Any, num_readers: int) -> str:
    read = (
        f"read by {num_readers} processes"
        if num_readers
        else "read in a thread (num_readers= of from_source, or num_workers=)"
    )
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
