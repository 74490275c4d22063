"""Lost examples are computed after a worker's own, each at its place in the global batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from adaptive.operators.sources import Reading
from adaptive.runtime.computed import Computed
from adaptive.runtime.pieces import Piece, compute_pieces

READING = Reading(4, 0, 1, 40, 9, 9, 1, 10, 0.1, 0.1)
BATCHES = {10: np.arange(10, 15), 30: np.arange(30, 33), 36: np.arange(36, 37)}
PIECES = [Piece(10, (3, 2), lambda: BATCHES[10]), Piece(30, (3,), lambda: BATCHES[30])]
PIECES += [Piece(36, (1,), lambda: BATCHES[36])]


class Steady:
    """Stands in for a `SteadyStep`: packs the numbers of the examples, and the place of each that a kernel receives."""

    def __init__(self, computed=None, *, same_state=True):
        self.computed, self.ahead, self._same, self.runs = computed, None, same_state, []

    def has_state_of(self, computed):
        return self._same

    def leaves_of(self, batch):
        return batch

    def compute(self, sizes, part, vectors, leaves, packed, done):
        assert vectors == (part, len(sizes))
        assert done == len(packed)
        assert part.examples == sum(sizes) == len(leaves)
        assert (part.step, part.batch_size) == (READING.step, READING.batch_size)
        self.runs.append(sizes)
        return [*packed, *zip((part.offset + done + np.arange(len(leaves))).tolist(), leaves.tolist(), strict=True)], []

    def record(self, step, sizes, batch, packed, kept, began):
        return Computed(step, sizes, batch, [], [], packed, kept, began)


FEED = SimpleNamespace(measure_step=lambda reading, n: (reading, n))
OWN = Computed(4, (3, 2), BATCHES[10], [], [], [(n, n) for n in range(10, 15)], [], 0.0, seconds=0.5)


@pytest.mark.parametrize(
    ("computed", "same_state", "runs"),
    [
        (OWN, True, [(3,), (1,)]),
        (None, True, [(3, 2), (3,), (1,)]),
        (OWN, False, [(3, 2), (3,), (1,)]),
        (OWN._replace(step=3), True, [(3, 2), (3,), (1,)]),
        (OWN._replace(sizes=(3, 3)), True, [(3, 2), (3,), (1,)]),
    ],
    ids=["all that was lost", "nothing was computed", "another state", "another step", "other examples"],
)
def test_what_was_computed_is_used_if_it_is_of_this_step(computed, same_state, runs):
    steady = Steady(computed, same_state=same_state)
    batch, sizes = compute_pieces(steady, FEED, READING, PIECES, own=1)
    assert batch.tolist() == [*range(10, 15), *range(30, 33), 36]
    assert sizes == (3, 2, 3, 1)
    assert steady.runs == runs
    assert steady.ahead.packed == [(n, n) for n in batch.tolist()]
    assert (steady.ahead.step, steady.ahead.sizes, steady.computed) == (4, sizes, None)
    assert steady.ahead.batch is batch


def test_a_second_loss_finds_two_pieces_computed():
    done = OWN._replace(sizes=(3, 2, 3), batch=np.concatenate([BATCHES[10], BATCHES[30]]))
    done = done._replace(packed=[(n, n) for n in done.batch.tolist()])
    steady = Steady(done)
    batch, sizes = compute_pieces(steady, FEED, READING, PIECES, own=2)
    assert steady.runs == [(1,)]
    assert (batch.tolist(), sizes) == ([*range(10, 15), *range(30, 33), 36], (3, 2, 3, 1))
    assert steady.ahead.packed == [(n, n) for n in batch.tolist()]
