"""Rows that are read outside of steps, when processes compare their data and in `evaluate`: watched as in steps."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from adaptive.base.ambient import AmbientContext
from adaptive.base.world import World

from .examples import Rows
from .read_watch import ReadWatch
from .reading import FIRST_PASS, Passes


class BackgroundRows:
    """A data set, of which `rows` is called in the thread of the data, and waited for. All else is the data set's own.

    Args:
      world: whose other processes wait meanwhile.
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
          DataError: one read has taken longer than the deadline.
        """
        if self._data.in_memory and not self._data.mapped:
            return self._data.rows(indices, passes)
        return self._watch.result(self._data.thread.submit(self._ambient.run, self._data.rows, indices, passes))


def in_background(data: Rows, world: World | None) -> Rows:
    """Return the data set with its `rows` called in a background thread, where they are read from somewhere."""
    return cast(Rows, BackgroundRows(data, world))
