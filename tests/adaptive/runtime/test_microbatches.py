"""The microbatches of a batch are the cheapest there are, and as few as that allows."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adaptive.runtime.microbatches import GAIN, candidates, cheapest, predict

POWERS = [1, 2, 4, 8, 16]


def all_ways(size, kernels):
    """Every multiset of kernels that sums to `size`."""
    kernels = tuple(sorted(kernels))

    @cache
    def ways(left, top):
        if left == 0:
            return ((),)
        return tuple((k, *rest) for k in kernels[:top] if k <= left for rest in ways(left - k, kernels.index(k) + 1))

    return ways(size, len(kernels))


costs = st.fixed_dictionaries({k: st.floats(0.1, 10) for k in POWERS})
bucket_sets = st.sets(st.sampled_from(POWERS), min_size=1)
any_kernels = st.sets(st.integers(1, 24), min_size=1, max_size=5)


@given(st.integers(1, 30), bucket_sets | any_kernels, st.data())
def test_kernels_are_put_together_at_the_least_cost_if_they_can_be(size, kernels, data):
    seconds = data.draw(st.fixed_dictionaries({k: st.floats(0.1, 10) for k in kernels}))
    found = cheapest(size, kernels, seconds.__getitem__)
    ways = all_ways(size, kernels)
    if not ways:
        assert found is None
        return
    assert sum(found) == size
    assert set(found) <= kernels
    assert list(found) == sorted(found, reverse=True)
    price = {way: sum(map(seconds.__getitem__, way)) for way in ways}
    best, fewest = min(price.values()), min(map(len, ways))
    cheapest_of_fewest = min(price[way] for way in ways if len(way) == fewest)
    cost = sum(map(seconds.__getitem__, found))
    if best < GAIN * cheapest_of_fewest * (1 - 1e-9):  # worth more calls
        assert cost == pytest.approx(best)
    elif best > GAIN * cheapest_of_fewest * (1 + 1e-9):
        assert len(found) == fewest
        assert cost == pytest.approx(cheapest_of_fewest)


@pytest.mark.parametrize(
    ("size", "kernels", "microbatches"),
    [(63, {31, 32}, (32, 31)), (61, {7, 5}, (7,) * 8 + (5,)), (48, {31, 17}, (31, 17)), (17, {7, 3}, (7, 7, 3))],
)
def test_kernels_other_than_powers_of_two_are_used_repeatedly(size, kernels, microbatches):
    assert cheapest(size, kernels, lambda s: 1.0) == microbatches


@given(st.integers(1, 100), costs)
def test_all_buckets_make_every_size(size, seconds):
    assert sum(cheapest(size, POWERS, seconds.__getitem__)) == size


def test_a_size_with_its_own_kernel_is_one_microbatch():
    assert cheapest(77, {77, *POWERS, 64}, lambda s: 1e-4 + 1e-6 * s) == (77,)


def test_an_odd_kernel_leaves_a_rest_to_the_powers():
    assert cheapest(25, {11, 1, 2, 4}, lambda s: 1.0) == (11, 11, 2, 1)
    assert cheapest(25, {11, 4}, lambda s: 1.0) is None


def test_bigger_is_not_always_faster():
    measured = {1024: 0.088, 128: 0.0056}  # a small conv net on one core
    assert cheapest(1024, measured, measured.__getitem__) == (128,) * 8


def test_a_small_gain_is_not_worth_more_microbatches():
    assert cheapest(8, {8, 4}, {8: 1.0, 4: 0.49}.__getitem__) == (8,)
    assert cheapest(8, {8, 4}, {8: 1.0, 4: 0.48}.__getitem__) == (4, 4)


@pytest.mark.parametrize(("size", "kernels"), [(3, {2}), (5, {4, 2}), (1, {8, 2}), (7, {5})])
def test_sizes_that_cannot_be_composed_give_none(size, kernels):
    assert cheapest(size, kernels, lambda s: 1.0) is None


def test_a_measured_size_is_predicted_by_its_measurement():
    assert predict(8, {8: 0.25, 16: 0.1}) == 0.25


@given(st.dictionaries(st.sampled_from(POWERS), st.floats(1e-5, 1), max_size=4), st.integers(1, 64))
def test_an_unmeasured_size_is_estimated_from_the_nearest(measured, size):
    assume(size not in measured)
    larger = [m for m in measured if m > size]
    nearest = min(larger) if larger else max(measured, default=None)
    per_example = measured[nearest] / nearest if measured else 10e-6
    assert predict(size, measured, overhead_seconds=1e-3) == pytest.approx(1e-3 + size * per_example)


def test_without_measurements_fewer_microbatches_win():
    assert cheapest(40, [*POWERS, 32], lambda s: predict(s, {})) == (32, 8)


@given(st.integers(1, 64), bucket_sets | any_kernels, st.data())
def test_candidates_make_the_size_and_have_the_best_among_them(size, kernels, data):
    seconds = data.draw(st.fixed_dictionaries({k: st.floats(0.1, 10) for k in kernels}))
    found = candidates(size, kernels, seconds.__getitem__)
    assert bool(found) == (cheapest(size, kernels, seconds.__getitem__) is not None)
    for way, price in found.items():
        assert sum(way) == size
        assert set(way) <= kernels
        assert price == pytest.approx(sum(seconds[k] for k in way))
    if found:
        assert cheapest(size, kernels, seconds.__getitem__) in found
        assert min(map(len, found)) == len(cheapest(size, kernels, lambda k: 1.0))


def test_each_kernel_is_used_as_often_as_it_fits_into_the_batch():
    assert set(candidates(12, {8, 4, 2}, lambda s: 1.0)) == {(8, 4), (4, 4, 4), (2,) * 6}
