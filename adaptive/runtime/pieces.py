"""A worker's batch of the next step in pieces that do not follow one another in the global batch.

A worker has such a batch if others were lost in a step: it adds some of their examples to its own, which it has
computed already.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from adaptive.data.reading import joined
from adaptive.operators.sources import Reading

from .microbatches import Microbatches
from .segment import Feed
from .steady_step import SteadyStep


class Piece(NamedTuple):
    """Examples that follow one another in the global batch.

    Attributes:
      start: the place of the first one.
      sizes: the microbatches in which they are computed.
      read: returns them.
    """

    start: int
    sizes: Microbatches
    read: Callable[[], Any]


def compute_pieces(
    steady: SteadyStep, feed: Feed, reading: Reading, pieces: Sequence[Piece], own: int
) -> tuple[Any, Microbatches]:
    """Compute the examples of the next step, for `steady` to go on with. Takes what it has computed in a step that
    could not be completed.

    Args:
      feed: the layout of sources.
      reading: that of the next step.
      own: the number of pieces that this worker had in that step.

    Returns:
      The batch of the next step, and its microbatches.
    """
    began, left, done = time.perf_counter(), list(pieces), 0
    packed, kept, batches, sizes = list[jax.Array](), list[jax.Array](), list[Any](), Microbatches()
    computed, steady.computed = steady.computed, None
    known = computed is not None and sum(computed.sizes) == sum(sum(piece.sizes) for piece in pieces[:own])
    if computed is not None and known and computed.step == reading.step and steady.has_state_of(computed):
        packed, kept, sizes, batches = computed.packed, computed.kept, computed.sizes, [computed.batch]
        began, done, left = began - computed.seconds, sum(sizes), left[own:]
    for piece in left:
        more, batch = sum(piece.sizes), piece.read()
        part = reading._replace(examples=more, offset=piece.start - done)
        vectors = feed.measure_step(part, len(piece.sizes))
        packed, kept = steady.compute(piece.sizes, part, vectors, steady.leaves_of(batch), packed, done)
        done, sizes, batches = done + more, (*sizes, *piece.sizes), [*batches, batch]
    whole = batches[0] if len(batches) == 1 else joined(batches)
    steady.ahead = steady.record(reading.step, sizes, whole, packed, kept, began)
    return whole, sizes
