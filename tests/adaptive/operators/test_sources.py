"""Sources: how their values reach the segments."""

from __future__ import annotations

import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.operators.sources import OFFSET, SEED, Reading, Source, read
from adaptive.runtime.segment import Feed
from tests.adaptive.drivers import planned

READING = Reading(3, 7, 1, 16, 6, 6, 1, 5, 0.1, 0.2, np.ones(2, bool))


def test_sources_reach_the_segments_in_two_vectors():
    speed = Source("speed", lambda r: 1.5 * r.compute_seconds)
    rank = Source("rank", lambda r: r.worker + 10, np.int32)

    def driver(state, batch):
        found = {"speed": comm.all_reduce(read(speed)), "rank": comm.all_reduce(read(rank), op="max")}
        return state + ad.step_number().astype(float) + 0 * comm.all_reduce(read(OFFSET).astype(float)), found

    feed = Feed.of(planned(driver, 0.0))
    floats, ints = feed.measure(READING)
    assert (floats.dtype, ints.dtype) == (np.float32, np.int32)
    values = {k: float(v) for k, v in feed.values(floats, ints).items()}
    assert values == {
        "speed": pytest.approx(0.15),
        "examples": 6,
        "worker": 1,
        "rank": 11,
        "step": 3,
        "offset": 5,
    }
    found = feed.values_of_microbatch(floats, ints, 2, 4)
    assert {k: float(v) for k, v in found.items()} == {**values, "examples": 2, "microbatches": 1, "offset": 9}


def test_any_seed_fits_a_source():
    for seed in (0, 2**31, 2**40 + 3, -1):
        value = SEED.read(READING._replace(seed=seed))
        assert np.int32(value) == value
