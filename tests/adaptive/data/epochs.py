"""What tests of stored data sets share: epochs of a stream, its restores, and refusals."""

from __future__ import annotations

import pytest

import adaptive as ad
from adaptive.data.adapters import examples_of
from adaptive.data.shards import stream_of
from adaptive.data.stream import Stream

N = 24
PLAN = [(4, 3), (2, 6), (5, 0), (4, 4), (3, 6), (7, 2), (5, 5)]  # 56 examples: two epochs and a part of the third


def opened(data):
    return Stream(stream_of(data, 2, range(2)), seed=0, workers=range(2))


def walk(stream, plan=PLAN, leaf="i"):
    """What the examples that are taken hold, in order."""
    seen = []
    for sizes in plan:
        share = stream.take(sizes)
        stream.prefetch(sizes)
        stream.advance(sizes)
        seen += [value for batch in share.batches if batch is not None for value in batch[leaf].tolist()]
    return seen


def check_epochs_and_restores(make, leaf="i"):
    """Each example once per epoch, and the same examples from any step on as in an unbroken run."""
    stream = opened(make())
    whole = walk(stream, leaf=leaf)
    stream.close()
    if leaf == "i":
        assert sorted(whole[:N]) == sorted(whole[N : 2 * N]) == list(range(N))
    for steps in (2, 5):
        first, other = opened(make()), opened(make())
        begun = walk(first, PLAN[:steps], leaf)
        other.go_on(first.cursors, first.place())
        assert begun + walk(other, PLAN[steps:], leaf) == whole
        first.close()
        other.close()
    return whole


def refused(data, says):
    for take in (examples_of, ad.data.from_iterator):
        with pytest.raises(ad.DataError) as error:
            take(data)
        assert says in str(error.value)
