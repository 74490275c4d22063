"""Parts of a message that are summed over processes, and the pieces in which they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class FlatPart(NamedTuple):
    """A part of a message, or a piece of one. Its arrays are one-dimensional, and local.

    Attributes:
      source: this process's values; None if they are in `target`.
      target: receives the sum.
    """

    source: np.ndarray | None
    target: np.ndarray


def pieces(parts: Iterable[FlatPart], nbytes: int) -> Iterator[FlatPart]:
    """Split parts into pieces of at most `nbytes`, of equal size within a part, and yield them in order."""
    for source, target in parts:
        for cut in cuts_of(target, nbytes):
            yield FlatPart(None if source is None else source[cut], target[cut])


def cuts_of(target: np.ndarray, nbytes: int) -> Iterator[slice]:
    """Yield the slices that split a one-dimensional array into pieces of at most `nbytes`, of equal size."""
    count = -(-target.size // (nbytes // target.itemsize))
    bounds = [target.size * i // max(count, 1) for i in range(count + 1)]
    return (slice(start, stop) for start, stop in pairwise(bounds))
