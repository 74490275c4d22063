"""Parts of a message that are summed over processes, and the pieces in which they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class FlatPart(NamedTuple):
    """A part of a message, or a piece of one. Its arrays are one-dimensional, and local.

    Attributes:
      number: number of the part in its message.
      source: this process's values; None if they are in `target`.
      target: receives the sum.
      start: the piece's first element in its part.
    """

    number: int
    source: np.ndarray | None
    target: np.ndarray
    start: int = 0


def pieces(parts: Iterable[FlatPart], nbytes: int) -> Iterator[FlatPart]:
    """Split parts into pieces of at most `nbytes`, of equal size within a part, and yield them in order."""
    for number, source, target, _ in parts:
        count = -(-target.size // (nbytes // target.itemsize))
        bounds = [target.size * i // max(count, 1) for i in range(count + 1)]
        for start, stop in pairwise(bounds):
            yield FlatPart(number, None if source is None else source[start:stop], target[start:stop], start)
