"""PyTorch's loaders and data sets, recognized by their attributes, so that torch is not imported here."""

from __future__ import annotations

import copy
import hashlib
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from adaptive.base.arrays import NotAnArrayError, on_host
from adaptive.base.errors import DataError

from .one_example import arrays_of_batch

_log = logging.getLogger("adaptive")

_OURS = {"SequentialSampler", "RandomSampler", "DistributedSampler"}  # these determine the order only


def is_loader(data: Any) -> bool:
    """Return whether `data` has the attributes of a `torch.utils.data.DataLoader`."""
    return all(hasattr(data, name) for name in ("dataset", "batch_size", "sampler", "collate_fn", "num_workers"))


def is_iterable_dataset(data: Any) -> bool:
    """Return whether `data` is a torch `IterableDataset`, which inherits a `__getitem__` that only raises."""
    return any(c.__name__ == "IterableDataset" and c.__module__.startswith("torch.") for c in type(data).__mro__)


def gives_batches(loader: Any) -> bool:
    """Return whether a loader makes batches of its data set's examples."""
    return getattr(loader, "batch_sampler", None) is not None


def replicas_of(data: Any) -> int:
    """Return the number of processes among which a loader's sampler divides the data set."""
    if not is_loader(data):
        return 1
    samplers = (data.sampler, getattr(getattr(data, "batch_sampler", None), "sampler", None))
    return max(_replicas(sampler) for sampler in samplers)


def _replicas(sampler: Any) -> int:
    known = any(c.__name__ == "DistributedSampler" for c in type(sampler).__mro__)
    return int(sampler.num_replicas) if known else 1


# --- a loader whose data set has an index -----------------------------------------------------------------------------


def collate_function(loader: Any) -> Callable[[Any], Any] | None:
    """Return a function that applies a loader's `collate_fn` to one example; `None` for the default `collate_fn`.

    Raises:
      DataError: the loader's sampler selects examples, which the program's order cannot reproduce.
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
        "per epoch. Pass the data set, of those examples (torch.utils.data.Subset); or, to keep the loader's order and "
        "lose its index:  ad.data.from_iterator(loader, batched=True)"
    )


def note_of_loader(loader: Any, num_readers: int, in_memory: bool = False) -> str:
    """Describe which options of a loader are used and which are not, if its data set is read by index."""
    read = (
        f"read by {num_readers} processes"
        if num_readers
        else "of tensors in memory (num_workers= is not needed)"
        if in_memory
        else "read in a thread (num_readers= of from_source, or num_workers=)"
    )
    collate = (
        "" if getattr(loader.collate_fn, "__name__", "").startswith("default_") else ", its collate_fn for each alone"
    )
    unused = [f"batch_size={loader.batch_size}", "shuffling"]
    unused += [f"the DistributedSampler's division by {replicas_of(loader)}"] if replicas_of(loader) > 1 else []
    unused += ["worker_init_fn"] if getattr(loader, "worker_init_fn", None) is not None else []
    return (
        f"the data set of the {type(loader).__name__} is used, by index, {read}{collate}. The program makes its own "
        f"batches and order of examples: {', '.join(unused)} and drop_last have no effect."
    )


class _OneByOne:
    """A loader's `collate_fn`, applied to single examples."""

    def __init__(self, collate: Callable[[list[Any]], Any]):
        self._collate = collate

    def __call__(self, example: Any) -> Any:
        batch = arrays_of_batch(self._collate([example]), "what the DataLoader's collate_fn returns")
        for leaf in jax.tree.leaves(batch):
            if leaf.shape[:1] != (1,):
                raise DataError(
                    f"the DataLoader's collate_fn makes an array of shape {leaf.shape} of one example; each array must "
                    "have a leading axis of examples. Pass its data set, and do the rest in  ad.data.from_source(map=…)"
                )
        return jax.tree.map(lambda leaf: leaf[0, ...], batch)  # `...` keeps arrays, so that no list of numbers results


# --- a loader that is iterated ----------------------------------------------------------------------------------------


class LoaderEpochs:
    """The epochs of a loader, with random numbers that depend only on the epoch.

    Works on a copy of the loader. The copy's samplers have generators that are reseeded for each epoch, so that all
    processes, and a run that is restored in mid-epoch, get the same order. The copy's workers are not forked from this
    process.

    Args:
      warns: whether this process logs warnings.
    """

    def __init__(self, warns: bool = True):
        self._given: Any = None
        self._loader: Any = None
        self._generators: list[tuple[Any, int]] = []
        self._repeats: _Repeats | None = None
        self._warns = warns
        self.notes: tuple[str, ...] = ()

    def begin(self, loader: Any, epoch: int) -> Iterator[Any]:
        """Return an iterator of the loader's batches in an epoch.

        Raises:
          DataError: the order of batches depends on the workers' timing.
        """
        if loader is not self._given:
            self.close()
            self._take(loader)
        for sampler in _samplers(self._loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        for generator, base in self._generators:
            state = np.random.SeedSequence([base, epoch]).generate_state(1, np.uint64)
            generator.manual_seed(int(state[0]) >> 1)
        repeats, self._repeats = self._repeats, None  # repetitions are detected in the first epoch only
        return _Batches(iter(self._loader), repeats)

    def _take(self, loader: Any) -> None:
        if loader.num_workers > 1 and not getattr(loader, "in_order", True):
            raise DataError(
                "the DataLoader has in_order=False: the order of its batches depends on which worker is faster, and "
                "differs from process to process. Leave it out."
            )
        self._given, self._loader = loader, copy.copy(loader)
        self._generators = _own_generators(self._loader)
        own_processes = _starts_by_fork(loader)
        if own_processes:
            from .loader_processes import LoaderContext

            self._loader.multiprocessing_context = LoaderContext()
        self.notes = (_note_of_processes(loader, own_processes),) if loader.num_workers else ()
        if self._warns and loader.num_workers > 1 and is_iterable_dataset(loader.dataset):
            self._repeats = _Repeats(loader.num_workers, gives_batches(loader))

    def close(self) -> None:
        """End the worker processes that outlive an epoch (persistent_workers=True)."""
        if self._loader is not None:
            _shut_down(getattr(self._loader, "_iterator", None))
        self._given = self._loader = None


def _starts_by_fork(loader: Any) -> bool:
    """Return whether a loader would fork its workers from this process."""
    if not loader.num_workers:
        return False
    chosen = getattr(loader, "multiprocessing_context", None)
    method = multiprocessing.get_start_method(allow_none=True) if chosen is None else chosen.get_start_method()
    return method in (None, "fork")


def _note_of_processes(loader: Any, own: bool) -> str:
    started = (
        "forked from a server process that has imported torch alone, so the script is not run again"
        if own
        else "started as its multiprocessing_context says"
    )
    lasting = "" if loader.persistent_workers else ", again in each epoch"
    return f"the {type(loader).__name__}'s {loader.num_workers} worker processes are {started}{lasting}."


def _samplers(loader: Any) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    return [found for found in (batches, getattr(batches, "sampler", None), loader.sampler) if found is not None]


def _own_generators(loader: Any) -> list[tuple[Any, int]]:
    """Give a copied loader its own samplers and generators. Returns the generators, with the original seed of each.

    A sampler without a generator draws from torch's global one, which has another seed in each process.
    """
    generators: list[tuple[Any, int]] = []

    def seeded(owner: Any) -> None:
        given = owner.generator
        owner.generator = sys.modules["torch"].Generator()
        generators.append((owner.generator, 0 if given is None else given.initial_seed() & (2**64 - 1)))

    def copied(sampler: Any) -> Any:
        sampler = copy.copy(sampler)
        if hasattr(sampler, "generator"):
            seeded(sampler)
        return sampler

    seeded(loader)
    sampler, batches = loader.sampler, getattr(loader, "batch_sampler", None)
    copies = {id(sampler): copied(sampler)}
    if batches is not None:
        batches = copied(batches)
        inner = getattr(batches, "sampler", None)
        if inner is not None:
            batches.sampler = copies.get(id(inner)) or copied(inner)
    # A loader refuses to set these attributes, so that nobody does so in mid-epoch.
    loader.__dict__.update(sampler=copies[id(sampler)], batch_sampler=batches)
    return generators


class _Batches:
    """The batches of an epoch of a loader, with a `close` that ends the loader's workers.

    Args:
      iterator: the loader's iterator.
      repeats: the detector of repetitions, which receives the batches, or `None`.
    """

    def __init__(self, iterator: Any, repeats: _Repeats | None):
        self._iterator, self._repeats = iterator, repeats

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._repeats is not None:
                self._repeats.end()
            raise
        if self._repeats is not None and not self._repeats.take(batch):
            self._repeats = None
        return batch

    def close(self) -> None:
        """End the workers, unless they persist beyond the epoch."""
        if not getattr(self._iterator, "_persistent_workers", False):
            _shut_down(self._iterator)


def _shut_down(iterator: Any) -> None:
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


class _Repeats:
    """A detector of an `IterableDataset` that is not divided among a loader's workers, so that all yield the same.

    Worker w of n yields the batches w, w + n, w + 2n, … of an epoch. The first batches of the workers are compared.
    Since data may contain equal examples, the detector warns only if all compared batches are equal and most of one
    worker's examples differ from one another.

    Args:
      workers: number of the loader's workers.
      batched: whether the loader yields batches.
    """

    ROUNDS, EXAMPLES = 4, 16  # least numbers of batches and examples of each worker, unless the epoch ends earlier

    def __init__(self, workers: int, batched: bool):
        self._workers, self._batched = workers, batched
        self._digests: list[list[bytes]] = []

    def take(self, batch: Any) -> bool:
        """Compare the next batch. Returns whether more batches are needed."""
        try:
            self._digests.append(_digests(batch, self._batched))
        except (NotAnArrayError, IndexError):  # reading the batch will raise the error
            return False
        if len(self._digests) % self._workers:
            return True
        alike = all(found == self._digests[-1] for found in self._digests[-self._workers :])
        enough = len(self._digests) >= self.ROUNDS * self._workers and len(self._of_one()) >= self.EXAMPLES
        if alike and enough:
            self.end()
        return alike and not enough

    def end(self) -> None:
        """Warn if the compared batches show that all workers yield the same examples."""
        seen = self._of_one()
        if len(self._digests) % self._workers or len(seen) < 2 or len(set(seen)) <= len(seen) / 2:
            return
        _log.warning(
            "the DataLoader's %d workers yield the same examples (the first %d of each were compared), so every "
            "example occurs %d times in an epoch. Let the data set's __iter__ yield worker w's part of the "
            "examples, with w = torch.utils.data.get_worker_info().id of .num_workers; or set num_workers=1.",
            self._workers,
            len(seen),
            self._workers,
        )

    def _of_one(self) -> list[bytes]:
        return [digest for batch in self._digests[:: self._workers] for digest in batch]


def _digests(batch: Any, batched: bool) -> list[bytes]:
    """Return a digest of each example of a batch."""
    leaves = [on_host(leaf) for leaf in jax.tree.leaves(batch)]
    rows = zip(*leaves, strict=False) if batched else [leaves]
    return [hashlib.blake2b(b"".join(np.asarray(leaf).tobytes() for leaf in row)).digest() for row in rows]
