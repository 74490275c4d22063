"""Reads of rows outside of steps, when processes compare their data and in `evaluate`, with warnings and deadline."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from adaptive.base.ambient import AmbientContext
from adaptive.base.world import World

from .examples import Rows
from .read_watch import ReadWatch
from .reading import FIRST_PASS, Passes


class BackgroundRows:
    """A data set whose `rows` is called in the data's fetch thread, and waited for. All other methods are unchanged.

    Args:
      data: the data set.
      world: the world whose other processes wait meanwhile; `None` if there are none.
    """

    def __init__(self, data: Rows, world: World | None):
        self._data, self._ambient = data, AmbientContext()
        self._watch = ReadWatch(data, world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def __len__(self) -> int:
        return len(self._data)

    def rows(self, indices: np.ndarray, passes: Passes = FIRST_PASS) -> Any:
        """Return the examples numbered `indices`, stacked.

        Raises:
          DataError: a read takes longer than the deadline.
        """
        if self._data.in_memory and not self._data.mapped:
            return self._data.rows(indices, passes)
        return self._watch.result(self._data.thread.submit(self._ambient.run, self._data.rows, indices, passes))


def in_background(data: Rows, world: World | None) -> Rows:
    """Return the data set with `rows` called in its fetch thread, unless rows are in memory."""
    return cast(Rows, BackgroundRows(data, world))
