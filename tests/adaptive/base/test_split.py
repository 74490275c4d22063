"""A global batch is split in proportion, in whole numbers, within the limits: exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import adaptive as ad
from adaptive.base.decision import Limits
from adaptive.base.split import check_shares, equal, split


@st.composite
def problems(draw):
    """Limits that can be kept, a global batch within them, and shares."""
    n = draw(st.integers(1, 6))
    lower = draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    upper = [low + draw(st.integers(0, 60)) for low in lower]
    share = st.one_of(st.floats(0, 100), st.sampled_from([0.0, 1.0, 1e-30, 1e30, 5e-324, 1e308]))
    shares = draw(st.lists(share, min_size=n, max_size=n).filter(any))
    there = [w for w in range(n) if shares[w] > 0]
    total = draw(st.integers(sum(lower[w] for w in there), sum(upper[w] for w in there)))
    quantum, unit = draw(st.sampled_from([1, 1, 2, 3, 4, 8, 16])), draw(st.sampled_from([1, 1, 2, 3, 8]))
    bounds = (tuple(unit * bound for bound in side) for side in (lower, upper))
    return unit * total, shares, Limits(*bounds, unit * quantum, unit)


@given(problems())
def test_a_split_sums_up_and_keeps_its_limits(problem):
    total, shares, limits = problem
    sizes = split(total, shares, limits)
    assert sum(sizes) == total
    limits = limits.of([share > 0 for share in shares])  # none for a share of 0, and some for any other
    assert all(low <= s <= up for low, s, up in zip(limits.lower, sizes, limits.upper, strict=True))
    assert all(type(s) is int and s % limits.multiple == 0 for s in sizes)
    assert split(total, shares, limits) == sizes


@given(problems())
def test_a_feasible_split_is_unchanged(problem):
    total, shares, limits = problem
    sizes = split(total, shares, limits)
    assert split(total, sizes, limits) == sizes
    assert split(total, [float(s) for s in sizes], limits._replace(quantum=48)) == sizes


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(6, 4000), st.sampled_from([0, 1, 10**6]))
def test_without_limits_no_size_is_one_example_from_its_share(shares, total, more):
    n = len(shares)
    sizes = split(total, shares, Limits((0,) * n, (total + more,) * n))
    ideal = total * np.array(shares) / np.sum(shares)
    assert np.abs(np.array(sizes) - ideal).max() < 1 + 1e-5


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=6), st.integers(1, 60), st.sampled_from([2, 4, 8]))
def test_sizes_are_multiples_of_the_quantum_but_for_the_rest(shares, quanta, quantum):
    n = len(shares)
    total = quanta * quantum + quantum // 2
    sizes = split(total, shares, Limits((0,) * n, (total,) * n, quantum))
    assume(max(sizes) != total)
    odd = [s for s in sizes if s % quantum]
    assert len(odd) <= 1
    ideal = total * np.array(shares) / np.sum(shares)
    assert np.abs(np.array(sizes) - ideal).max() < 2 * quantum


@given(st.integers(1, 8), st.integers(8, 500))
def test_equal_sizes_differ_by_at_most_one(n, total):
    sizes = equal(total, Limits((1,) * n, (total,) * n, 16))
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1


def test_of_equal_remainders_the_first_workers_get_the_rest():
    assert split(11, [1.0] * 4, Limits((1,) * 4, (9,) * 4)) == (3, 3, 3, 2)
    assert split(9, [1.0, 1.0, 7.0, 1.0, 1.0], Limits((1,) * 5, (9,) * 5)) == (1, 1, 5, 1, 1)


def test_workers_with_no_share_take_nothing():
    limits = Limits((1,) * 3, (10, 10, 10), 4)
    assert split(16, [1, 0, 1], limits) == (8, 0, 8)
    assert split(1, [0, 1, 0], limits) == (0, 1, 0)  # so a batch may be smaller than the number of workers
    assert split(9, [0, 1, 1e-300], limits) == (0, 8, 1)
    with pytest.raises(ad.BatchSizeError, match=r"16 cannot be split over 1 workers .* at least 1 and at most 10"):
        split(16, [1, 0, 0], limits)


@pytest.mark.parametrize(
    ("shares", "wrong"),
    [
        ([1.0], r"one number per worker, 2 of them; got shape \(1,\)"),
        ([[1.0, 2.0]], r"got shape \(1, 2\)"),
        ([1.0, float("nan")], "finite and not negative; got"),
        ([1.0, float("inf")], "finite and not negative"),
        ([1.0, -0.5], r"not negative; got \[1.0, -0.5\]: the share of worker 1 is negative"),
        ([0, 0], "all zero"),
    ],
)
def test_shares_that_are_none_are_refused(shares, wrong):
    with pytest.raises(ad.BatchSizeError, match=wrong):
        check_shares(shares, 2)
    with pytest.raises(ad.BatchSizeError, match=wrong):
        split(10, shares, Limits((1, 1), (10, 10)))


@pytest.mark.parametrize("total", [1, 21])
def test_a_batch_that_fits_nowhere_is_refused(total):
    with pytest.raises(ad.BatchSizeError, match=f"{total} cannot be split over 2 .* at least 2 and at most 20"):
        split(total, [1, 1], Limits((1, 1), (10, 10)))
