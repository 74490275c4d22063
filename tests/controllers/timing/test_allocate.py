"""The allocator against brute force, the greedy it is equivalent to, and published splits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import controllers as ctrl
from adaptive.base.errors import BatchSizeError

LBB = ctrl.timing.BatchTime((0.5931, 0.5808, 0.6023, 2.6714), (5.896, 7.152, 8.291, 50.982))  # milliseconds


@st.composite
def problems(draw, max_workers=4, max_size=7):
    """Few distinct numbers, so that ties, flat stretches and workers pinned to a bound are common."""
    n = draw(st.integers(1, max_workers))

    def column(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    times = ctrl.timing.BatchTime(
        np.array(column(st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5]))),
        np.array(column(st.sampled_from([-1.0, 0.0, 0.7, 3.0]))),
        np.array(column(st.sampled_from([0.0, 1.0, 2.5, 4.0]))),
    )
    lower = np.array(column(st.integers(0, 3)))
    upper = lower + np.array(column(st.integers(0, max_size)))
    total = draw(st.integers(int(lower.sum()), int(upper.sum())))
    return total, times, lower, upper


def brute_force(total, times, lower, upper):
    ranges = [range(a, b + 1) for a, b in zip(lower, upper, strict=True)]
    return min(times(np.array(split)).max() for split in itertools.product(*ranges) if sum(split) == total)


def assert_splits(sizes, total, lower, upper):
    assert sizes.dtype == np.int64
    assert sizes.sum() == total
    assert (sizes >= lower).all()
    assert (sizes <= upper).all()


@given(problems())
def test_no_split_is_faster(problem):
    total, times, lower, upper = problem
    best = brute_force(*problem)
    sizes = ctrl.timing.allocate(*problem)
    assert_splits(sizes, total, lower, upper)
    assert times(sizes).max() == best


@given(problems(), st.integers(0, 2**32 - 1))
def test_a_split_near_another_is_as_fast(problem, seed):
    total, times, lower, upper = problem
    near = np.random.default_rng(seed).integers(0, 8, len(lower))
    sizes = ctrl.timing.allocate(*problem, near=near)
    assert_splits(sizes, total, lower, upper)
    assert times(sizes).max() == times(ctrl.timing.allocate(*problem)).max()


def test_the_four_gpus_of_lbb():
    sizes = ctrl.timing.allocate(512, LBB, 1, 512)
    assert sizes.tolist() == [166, 167, 159, 20]
    assert LBB(sizes).max() == pytest.approx(104.41, abs=0.01)
    assert LBB(np.full(4, 128)).max() / LBB(sizes).max() == pytest.approx(3.76, abs=0.01)


def test_near_keeps_a_worker_of_constant_time():
    times = ctrl.timing.BatchTime((0.05, 0.1, 0.1, 0.3), 0.0, (20.0, 0, 0, 0))
    assert ctrl.timing.allocate(400, times, 1, 400)[0] == 1  # its time is 20 either way, so nothing holds it
    sizes = ctrl.timing.allocate(400, times, 1, 400, near=(100, 100, 100, 100))
    assert sizes[0] > 100
    assert times(sizes).max() == 20


@pytest.mark.parametrize("quantum", [2, 8, 16])
def test_sizes_are_multiples_of_the_quantum_but_for_one_remainder(quantum):
    sizes = ctrl.timing.allocate(515, LBB, 1, 512, quantum=quantum)
    assert sizes.sum() == 515
    assert (sizes % quantum != 0).sum() == 1
    sizes = ctrl.timing.allocate(512, LBB, 1, 512, quantum=quantum)
    assert (sizes % quantum == 0).all()


@given(problems(max_size=40), st.integers(1, 9))
def test_a_quantum_never_breaks_the_bounds(problem, quantum):
    total, _, lower, upper = problem
    assert_splits(ctrl.timing.allocate(*problem, quantum=quantum), total, lower, upper)


def test_the_remainder_goes_to_the_worker_that_it_delays_least():
    times = ctrl.timing.BatchTime((1.0, 0.1), (0.0, 7.0))
    assert ctrl.timing.allocate(19, times, 0, 100, quantum=8).tolist() == [8, 11]


@pytest.mark.parametrize("quantum", [1, 8])
def test_an_impossible_split_is_refused_with_the_numbers(quantum):
    with pytest.raises(BatchSizeError, match=r"global batch of 2000 .* at most 1200 examples .* at most 300 each"):
        ctrl.timing.allocate(2000, LBB, 1, 300, quantum=quantum)
    with pytest.raises(BatchSizeError, match="at least 4"):
        ctrl.timing.allocate(3, LBB, 1, 300, quantum=quantum)
    with pytest.raises(BatchSizeError, match="finite"):
        ctrl.timing.allocate(10, ctrl.timing.BatchTime((np.nan, 1.0)), 1, 300)
    with pytest.raises(BatchSizeError, match="must not decrease"):
        ctrl.timing.allocate(10, ctrl.timing.BatchTime((-1.0, 1.0)), 1, 300)
