"""The seconds of a kernel, estimated from noisy timings of its size and of larger ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive.runtime.kernels.timings import SAMPLES, MicrobatchTimes


def timed(seconds):
    times = MicrobatchTimes()
    for size, all_of_it in seconds.items():
        for s in all_of_it:
            times.record(size, s)
    return times


def test_a_size_is_known_after_some_timings():
    times = MicrobatchTimes()
    for number in range(SAMPLES):
        assert times.wanted(8)
        assert times.seconds == {}
        times.record(8, 3.0 - 0.5 * number)
    assert not times.wanted(8)
    assert times.seconds == {8: 2.0}


def test_a_disturbance_does_not_count():
    assert timed({8: [2.0, 2.0, 2.0, 50.0]}).seconds == {8: 2.0}


def test_a_size_with_disturbed_timings_is_not_slower_than_a_larger_one():
    times = timed({4: [9.1, 62.0, 264.0], 8: [3.8, 3.9, 4.1], 16: [5.0, 5.0, 5.0]})
    assert times.seconds == {4: 3.8, 8: 3.8, 16: 5.0}


def test_a_change_of_the_machine_is_followed():
    times = timed({8: [1.0] * 7})
    for _ in range(7):
        times.record(8, 2.0)
    assert times.seconds == {8: 2.0}


def test_a_forgotten_size_is_not_known():
    times = timed({8: [1.0] * 3, 4: [5.0] * 3})
    times.forget(8)
    times.forget(99)
    assert times.seconds == {4: 5.0}
    assert times.wanted(8)


def test_the_best_of_few_timings_is_available_before_they_suffice():
    times = timed({8: [2.0, 3.0]})
    assert times.at_best(8) == 2.0
    assert times.at_best(4) == times.predict(4)


@pytest.mark.parametrize("call", [0, 10, 30])
def test_the_cost_of_a_microbatch_is_the_time_of_short_ones_beyond_their_examples(call):
    times = timed({size: [(call + size) * 1e-5] * 3 for size in (1, 2, 4, 8, 16, 32, 64, 128, 1 << 14)})
    assert times.overhead_examples() == pytest.approx(call, rel=0.02, abs=0.1)
    assert MicrobatchTimes().overhead_examples() is None


@given(st.dictionaries(st.integers(1, 64), st.lists(st.floats(1e-6, 1), min_size=3, max_size=9), min_size=1))
def test_larger_microbatches_take_no_less(timings):
    known = timed(timings).seconds
    assert set(known) == set(timings)
    seconds = [known[size] for size in sorted(known)]
    assert seconds == sorted(seconds)
    assert all(known[size] <= min(timings[size][-7:]) for size in known)


@pytest.mark.parametrize("seed", range(5))
def test_estimates_are_near_under_noise(seed):
    """Half of all timings are disturbed, by half of what they take on average."""
    rng = np.random.default_rng(seed)
    truth = {size: 50e-6 + 10e-6 * size for size in (1 << i for i in range(11))}
    noise = rng.random((7, len(truth))) < 0.5
    factors = 1 + noise * rng.exponential(0.5, noise.shape)
    times = timed({size: list(t * factors[:, i]) for i, (size, t) in enumerate(truth.items())})
    assert times.seconds == pytest.approx(truth, rel=0.1)
