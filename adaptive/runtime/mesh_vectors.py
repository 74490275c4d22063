"""The values that steps on a mesh read from the host: sizes, the seed and measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaptive.operators import sources
from adaptive.operators.sources import Reading

from .mesh_arrays import MeshArrays
from .segment import Feed

_ON_DEVICES = sources.FIXED | {sources.STEP}  # the step number is counted on the devices


class MeshVectors:
    """The vectors of sources of all workers, on the devices; sent again when they change.

    Args:
      feed: puts the values of sources into vectors.
      arrays: the arrays over the mesh.
    """

    def __init__(self, feed: Feed, arrays: MeshArrays):
        self._feed, self._arrays = feed, arrays
        self._measured = [(1, i, s) for i, s in enumerate(feed.floats, 1) if s not in _ON_DEVICES]
        self._measured += [(2, i, s) for i, s in enumerate(feed.ints) if s not in _ON_DEVICES]
        self._said: list[list[float]] = []
        self._known: tuple[Any, ...] = ()  # (sizes and seed, vectors on the host)
        self._there: Any = None

    def vectors(self, sizes: tuple[int, ...], readings: Sequence[Reading], microbatches: int) -> tuple[Any, Any]:
        """Return floats and integers for the next step; shape=(workers, elements) each.

        Args:
          microbatches: their number on each worker.
        """
        key = sizes, readings[0].seed, microbatches
        if not self._known or key != self._known[0]:
            vectors = [self._feed.measure_step(reading, microbatches) for reading in readings]
            self._known = key, [floats[None] for floats, _ in vectors], [ints[None] for _, ints in vectors]
            self._said = []
            self._there = self._arrays.rows(self._known[1:])
        elif self._measured:
            said = [[source.read(reading) for _, _, source in self._measured] for reading in readings]
            if said != self._said:
                self._said = said
                for row, values in enumerate(said):
                    for (kind, place, _), value in zip(self._measured, values, strict=True):
                        self._known[kind][row][0, place] = value
                self._there = self._arrays.rows([[row.copy() for row in rows] for rows in self._known[1:]])
        return self._there
