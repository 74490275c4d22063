"""Digests by which processes check before the first step that they have the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from adaptive.base.values.tree_paths import leaf_names

from .iterators import IterableData
from .rows import Data, Rows

# Arrays are compared as a whole (0.8 s per GB) up to `_ALL_BYTES`. Of larger ones, and of sources, whose rows run user
# code, a sample is compared: if one row in a hundred differs, 512 rows miss that in one of 170 cases.
_ALL_BYTES = 256 << 20
_BLOCK_BYTES = 16 << 20
_ROWS_OF_LARGE, _ROWS_OF_SOURCES, _FIRST_OF_ITERATORS = 4096, 512, 16


def digests_of_data(data: Data) -> dict[str, str]:
    """Return the number of examples and a digest of each leaf, as text by name; of an iterator, of its first examples;
    of iterators per worker, only shapes and dtypes. Local.
    """
    count, digests = "iterators of each worker's own", [""] * len(jax.tree.leaves(data.example))
    if isinstance(data, Rows):
        count = " + ".join(map(str, data.lengths)) + " examples"
        digests = _digests(data)
    elif isinstance(data, IterableData) and not data.how.per_worker:
        count, digests = "an iterator", _hashes([data.first_batch(_FIRST_OF_ITERATORS)])
    leaves = zip(leaf_names(data.example, "data"), jax.tree.leaves(data.example), digests, strict=True)
    return {"data": count, **{name: f"{leaf.dtype}{list(leaf.shape)} {digest}" for name, leaf, digest in leaves}}


def _digests(data: Rows) -> list[str]:
    """Return a digest of each leaf; reads blocks, so that the data may be larger than memory."""
    row_bytes = max(1, sum(leaf.nbytes for leaf in jax.tree.leaves(data.example)))
    most = len(data) if len(data) * row_bytes <= _ALL_BYTES else _ROWS_OF_LARGE
    rows, block = _sample(len(data), most if data.by_row else _ROWS_OF_SOURCES), max(1, _BLOCK_BYTES // row_bytes)
    return _hashes(data.rows(rows[start : start + block]) for start in range(0, len(rows), block))


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
    """Return sorted indices, one from each of equal intervals; at random, to find differences at regular distances."""
    if length <= rows:
        return np.arange(length)
    edges = np.linspace(0, length, rows + 1).astype(int)
    return np.random.Generator(np.random.Philox(key=[length, rows])).integers(edges[:-1], edges[1:])
