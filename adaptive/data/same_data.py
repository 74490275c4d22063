"""Digests by which processes check before the first step that they have the same data."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from adaptive.base.tree_paths import leaf_names

from .example import stacked
from .iterators import IterableData
from .rows import Rows

# Arrays are compared as a whole (0.8 s per GB) up to `_ALL_BYTES`. Of larger ones, and of sources, whose rows run user
# code, a sample is compared: if one row in a hundred differs, 512 rows miss that in one of 170 cases.
_ALL_BYTES = 256 << 20
_BLOCK_BYTES = 16 << 20
_ROWS_OF_LARGE, _ROWS_OF_SOURCES, _ROWS_READ_TWICE, _FIRST_OF_ITERATORS = 4096, 512, 16, 16
# For a source that a single process reads: an augmentation of every second example is missed in one of 32 cases. After
# `_SECONDS_OF_READING_TWICE` no further row is started, so a slow source costs two reads.
_ROWS_READ_TWICE_ALONE, _SECONDS_OF_READING_TWICE = 5, 0.2

_log = logging.getLogger("adaptive")


def digests_of_data(data: Rows | IterableData) -> dict[str, str]:
    """Return the number of examples (of each shard) and a digest of each leaf, as text by name. Local.

    Of an iterator, the first examples, which stay available to the stream; of iterators per worker, only the examples'
    shapes and dtypes.
    """
    count, digests = "iterators of each worker's own", [""] * len(jax.tree.leaves(data.example))
    if not isinstance(data, IterableData):
        count = " + ".join(str(shard.length) for shard in data.shard_ranges) + " examples"
        digests = _digests(data, _compared(data))
    elif not data.how.per_worker:
        count, digests = "an iterator", _hashes([stacked(data.first_examples(_FIRST_OF_ITERATORS))])
    leaves = zip(leaf_names(data.example, "data"), jax.tree.leaves(data.example), digests, strict=True)
    return {"data": count, **{name: f"{leaf.dtype}{list(leaf.shape)} {digest}" for name, leaf, digest in leaves}}


def steadiness(data: Rows | IterableData, rank: int) -> dict[str, str]:
    """Return {} if sampled rows of a source are the same when read twice; otherwise a text that names a row and rank.

    Processes compare the results, so that one process's finding becomes an error on all.
    """
    row = _unsteady_row(data, _ROWS_READ_TWICE)
    text = f"data[{row}] is another example the second time (seen by rank {rank})"
    return {} if row is None else {"data, read twice,": text}


def warn_unless_steady(data: Rows | IterableData) -> None:
    """Log a warning if one of a few examples of a source differs when it is read twice.

    For a single process, which cannot compare its data with others. Skips sources with reader processes, whose start
    would take long.
    """
    if isinstance(data, IterableData) or data.processes:
        return
    row = _unsteady_row(data, _ROWS_READ_TWICE_ALONE, _SECONDS_OF_READING_TWICE)
    if row is not None:
        _log.warning(
            "data[%d] differs when it is read again: the source draws its own random numbers (of np.random, random or "
            "torch). So a repeated step, in this run or in a restored one, gives another result, and several processes "
            "would refuse the data. Draw the numbers from the rng that random_map= receives:  "
            "ad.data.from_source(data, random_map=fn), with fn(example, rng)",
            row,
        )


def _unsteady_row(data: Rows | IterableData, rows: int, seconds: float = math.inf) -> int | None:
    """Return the first of some rows of a source that differs when it is read twice, or `None`."""
    if isinstance(data, IterableData) or data.by_row:
        return None
    end = time.monotonic() + seconds
    for row in _sample(len(data), rows).tolist():
        try:
            first, again = (_digests(data, np.array([row])) for _ in range(2))
        except Exception:  # raised by user code; a step will raise it again, and the others wait for this result
            return None
        if first != again:
            return row
        if time.monotonic() > end:
            return None
    return None


def _compared(data: Rows) -> np.ndarray:
    """Return the indices of the rows that processes compare."""
    if not data.by_row:
        return _sample(len(data), _ROWS_OF_SOURCES)
    row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(data.example))
    return np.arange(len(data)) if len(data) * row_bytes <= _ALL_BYTES else _sample(len(data), _ROWS_OF_LARGE)


def _digests(data: Rows, numbers: np.ndarray) -> list[str]:
    """Return a digest of each leaf over these rows; reads blocks, so that the data may be larger than memory."""
    block = max(1, _BLOCK_BYTES // max(1, sum(leaf.nbytes for leaf in jax.tree.leaves(data.example))))
    return _hashes(data.rows(numbers[start : start + block]) for start in range(0, len(numbers), block))


def _hashes(batches: Iterable[Any]) -> list[str]:
    """Return a digest of each leaf over all batches."""
    found: list[Any] = []
    for batch in batches:
        leaves = jax.tree.leaves(batch)
        found = found or [hashlib.blake2b(digest_size=8) for _ in leaves]
        for digest, leaf in zip(found, leaves, strict=True):
            digest.update(np.ascontiguousarray(leaf).view(np.uint8).data if leaf.size else b"")
    return [digest.hexdigest() for digest in found]


def _sample(length: int, rows: int) -> np.ndarray:
    """Return sorted indices of at most this many rows; the same on all processes.

    One index is drawn from each of equal intervals. Random indices also find differences at regular distances.
    """
    if length <= rows:
        return np.arange(length)
    edges = np.linspace(0, length, rows + 1).astype(int)
    return np.random.Generator(np.random.Philox(key=[length, rows])).integers(edges[:-1], edges[1:])
