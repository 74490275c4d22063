"""Data of each worker's own: what devices, hospitals and machines that may not share their data train on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import numpy as np

from adaptive.base.errors import DataError
from adaptive.base.source_lines import name_workers
from adaptive.base.tree_paths import leaf_names
from adaptive.base.world import World

from .adapters import examples_of
from .examples import Examples, Rows, ShardRange, shapes_of
from .fetch_thread import FetchThread
from .iterable import FromIterator, IterableData
from .read_watch import CurrentRead
from .reading import FIRST_PASS, Passes


class Shards:
    """One data set per worker, for `Program`'s `data`.

        program = ad.Program(driver, state, ad.Shards([data_0, data_1, data_2]), global_batch=96)

    Worker i takes the next examples of shard i, which it goes through in another order in each epoch of the *shard*:
    each example once per shard epoch, whatever is resized. A batch that spans the end of a shard epoch can hold one
    example twice. How many it takes per step is its batch size, so a worker with a larger batch goes through its
    shard more often. The program's own epochs count examples: as many as there are
    in all shards, whoever takes them.

    Every process is given all the shards, of which it reads those of its own workers. Numbered end to end they are one
    data set, which is what `evaluate` takes them for.

    Args:
      data_sets: one per worker, in their order: pytrees of arrays, or sources, as for `Program`; examples of all must
        have the same structure, shapes and dtypes. Their numbers may differ.

    Raises:
      DataError: no data sets, one that is empty, or one whose examples are built otherwise.
    """

    def __init__(self, data_sets: Iterable[Any]):
        if isinstance(data_sets, str | Mapping) or hasattr(data_sets, "shape"):
            raise DataError(f"Shards takes a list of data sets, one per worker; got a {type(data_sets).__name__}.")
        self.thread = FetchThread("adaptive-input")
        self._shards = [_examples(number, data) for number, data in enumerate(data_sets)]
        if not self._shards:
            raise DataError("Shards takes one data set per worker; got none.")
        self.example = self._shards[0].example
        for number, shard in enumerate(self._shards):
            _check_like(self.example, shard.example, number)
        ends = list(accumulate(len(shard) for shard in self._shards))
        self.length = ends[-1]
        self.shard_ranges = tuple(ShardRange(end - len(s), len(s)) for end, s in zip(ends, self._shards, strict=True))
        self._ends = np.array(ends)

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Shards of {' + '.join(str(shard.length) for shard in self.shard_ranges)} examples"

    @property
    def in_memory(self) -> bool:
        """Whether all shards are arrays."""
        return all(shard.in_memory for shard in self._shards)

    @property
    def mapped(self) -> bool:
        """Whether arrays of some shards are on a disk."""
        return any(shard.mapped for shard in self._shards)

    @property
    def num_readers(self) -> int:
        """Processes that read, of the shard that has most; each shard has its own."""
        return max(shard.num_readers for shard in self._shards)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of how the data were taken."""
        return tuple(dict.fromkeys(note for shard in self._shards for note in shard.notes))

    def submit(self, indices: np.ndarray, passes: Passes) -> Future[Any]:
        """Examples of one shard, stacked, as soon as a process has read them."""
        shard = int(np.searchsorted(self._ends, indices[0], side="right"))
        return self._shards[shard].submit(indices - self.shard_ranges[shard].start, passes)

    @property
    def read_timeout(self) -> float | None:
        """The longest of the shards', which `from_source` was given; 0, no limit, is longest."""
        given = [shard.read_timeout for shard in self._shards if shard.read_timeout is not None]
        return None if not given else 0.0 if 0.0 in given else max(given)

    def current_reads(self) -> list[CurrentRead]:
        """Return what is being read now, by threads of this process or by others."""
        return [
            replace(read, what=f"{read.what} of shard {number}")
            for number, shard in enumerate(self._shards)
            for read in shard.current_reads()
        ]

    def abandon(self) -> None:
        """End the processes that read; they are started again when they are needed."""
        self.close()

    def close(self) -> None:
        """End the processes that read."""
        for shard in self._shards:
            shard.close()

    def rows(self, indices: np.ndarray, passes: Passes = FIRST_PASS) -> Any:
        """The examples numbered `indices`, the shards lying end to end, stacked."""
        shard_of = np.searchsorted(self._ends, indices, side="right")
        numbers = np.unique(shard_of)
        parts = [
            self._shards[k].rows(indices[shard_of == k] - self.shard_ranges[k].start, passes.of(k, shard_of == k))
            for k in numbers
        ]
        if len(parts) == 1:
            return parts[0]
        back = np.argsort(np.argsort(shard_of, kind="stable"))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[back], *parts)

    def shapes(self, examples: int) -> Any:
        """A batch of that many examples, as shapes."""
        return shapes_of(self.example, examples)


def stream_of(data: Any, workers: int, mine: Sequence[int], world: World | None = None) -> Rows | IterableData:
    """What a user gave as data to train on.

    Args:
      workers: of which each must have a shard, if there are shards.
      mine: the workers of this process.
      world: whose other processes wait while an iterator is read.

    Raises:
      DataError: it cannot be used.
    """
    found = data if isinstance(data, Shards) else examples_of(data)
    return IterableData(found, workers, mine, world) if isinstance(found, FromIterator) else rows_of(found, workers)


def rows_of(data: Any, workers: int | None = None) -> Rows:
    """What a user gave as data that have an index.

    Args:
      workers: of which each must have a shard, if there are shards.

    Raises:
      DataError: it cannot be used.
    """
    if not isinstance(data, Shards):
        found = examples_of(data)
        if isinstance(found, FromIterator):
            raise DataError(
                "these data have no index, and nobody knows their end: they can be trained on, and not dealt out here. "
                "Give a list of them, if memory holds it:  list(data)"
            )
        return found
    if workers is not None and len(data.shard_ranges) != workers:
        raise DataError(
            f"Shards of {len(data.shard_ranges)} data sets for {workers} workers. Give one for each worker."
        )
    return data


def _examples(number: int, data: Any) -> Examples:
    try:
        found = examples_of(data)
    except DataError as error:
        raise DataError(f"shard {number}: {error}") from None
    if isinstance(found, FromIterator):
        raise DataError(
            f"shard {number} has no index. Where each worker is to have an iterator of its own, say so by a parameter "
            "of the function that begins it:  ad.data.from_iterator(lambda worker: …)"
        )
    return found


def _check_like(first: Any, example: Any, number: int) -> None:
    if jax.tree.structure(example) != jax.tree.structure(first):
        raise DataError(
            f"shard {number} is built as {jax.tree.structure(example)}, shard 0 as {jax.tree.structure(first)}."
        )
    for name, a, b in zip(leaf_names(first, "example"), jax.tree.leaves(first), jax.tree.leaves(example), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise DataError(
                f"{name} is {b.dtype}{list(b.shape)} in shard {number}, but {a.dtype}{list(a.shape)} in shard 0."
            )


def unused_shards(
    data: Rows | IterableData, sizes: Sequence[int], previous: Sequence[int], *, first: bool
) -> list[str]:
    """What is to be said of workers whose own data are not used from a step of these sizes on.

    Args:
      previous: the sizes of the step before, unless it is the `first`.
    """
    if not isinstance(data, Shards):
        return []
    new = [w for w, size in enumerate(sizes) if size == 0 and (previous[w] or first)]
    return [f"no examples for {name_workers(new)}, whose data are not used."] if new else []
