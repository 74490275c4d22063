"""A global batch is split in proportion, in whole numbers, within the limits: exactly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import adaptive as ad
from adaptive.base.decision import Decision, Limits
from adaptive.control.hooks import Sizes
from adaptive.control.sizes import check_shares, equal, split


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
    quantum = draw(st.sampled_from([1, 1, 2, 3, 4, 8, 16]))
    return total, shares, Limits(tuple(lower), tuple(upper), quantum)


@given(problems())
def test_a_split_sums_up_and_keeps_its_limits(problem):
    total, shares, limits = problem
    sizes = split(total, shares, limits)
    assert sum(sizes) == total
    limits = limits.of([share > 0 for share in shares])  # none for a share of 0, and some for any other
    assert all(low <= s <= up for low, s, up in zip(limits.lower, sizes, limits.upper, strict=True))
    assert all(type(s) is int for s in sizes)
    assert split(total, shares, limits) == sizes


@given(problems())
def test_a_split_is_taken_again_as_it_is(problem):
    total, shares, limits = problem
    sizes = split(total, shares, limits)
    assert split(total, sizes, limits) == sizes
    assert split(total, [float(s) for s in sizes], limits._replace(quantum=16)) == sizes


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(6, 4000))
def test_without_limits_no_size_is_one_example_from_its_share(shares, total):
    n = len(shares)
    sizes = split(total, shares, Limits((0,) * n, (total,) * n))
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
def test_equal_is_as_equal_as_whole_numbers_can_be(n, total):
    sizes = equal(total, Limits((1,) * n, (total,) * n, 16))
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1


def test_a_larger_share_never_gets_less():
    sizes = split(100, [1, 2, 3, 4, 5], Limits((1,) * 5, (100,) * 5))
    assert list(sizes) == sorted(sizes)


def test_what_a_full_worker_cannot_take_goes_to_the_others_in_proportion():
    assert split(100, [8, 1, 1], Limits((1,) * 3, (40, 100, 100))) == (40, 30, 30)


def test_workers_with_no_share_take_nothing():
    limits = Limits((1,) * 3, (10, 10, 10), 4)
    assert split(16, [1, 0, 1], limits) == (8, 0, 8)
    assert split(1, [0, 1, 0], limits) == (0, 1, 0)  # so a batch may be smaller than the number of workers
    assert split(9, [0, 1, 1e-300], limits) == (0, 8, 1)
    with pytest.raises(ad.BatchSizeError, match=r"16 cannot be split over 1 workers .* at least 1 and at most 10"):
        split(16, [1, 0, 0], limits)


def test_who_takes_no_part_is_told_by_the_limits_as_well():
    limits = Limits((2,) * 3, (10, 20, 30), 4).of([True, False, True])
    assert (limits.lower, limits.upper, limits.active) == ((2, 0, 2), (10, 0, 30), (0, 2))
    assert split(12, [1, 8, 2], limits) == (4, 0, 8)
    assert equal(7, limits) == (4, 0, 3)


def test_whole_numbers_outside_the_limits_are_shares():
    assert split(10, [8, 2], Limits((1, 1), (6, 10))) == (6, 4)


@pytest.mark.parametrize(
    ("shares", "wrong"),
    [
        ([1.0], r"one number per worker, 2 of them; got shape \(1,\)"),
        ([[1.0, 2.0]], r"got shape \(1, 2\)"),
        ([1.0, float("nan")], "finite and not negative; got"),
        ([1.0, float("inf")], "finite and not negative"),
        ([1.0, -0.5], r"not negative; got \[1.0, -0.5\]"),
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


# --- the split in force, and the one asked for ------------------------------------------------------------------------


def in_force(global_batch=12, upper=(10, 10), shares=(1, 1), quantum=1, examples=100):
    return Sizes(global_batch, shares, Limits((1,) * len(upper), upper, quantum), examples)


def test_a_decision_waits_until_it_is_applied():
    sizes = in_force()
    assert sizes.ask(Decision(global_batch=16)) == []
    assert (sizes.current, sizes.pending, sizes.target) == ((6, 6), (8, 8), (8, 8))
    sizes.step_done(apply=False)
    assert (sizes.previous, sizes.current, sizes.pending) == ((6, 6), (6, 6), (8, 8))
    sizes.step_done(apply=True)
    assert (sizes.previous, sizes.current, sizes.pending) == ((6, 6), (8, 8), None)
    sizes.step_done(apply=True)  # where nothing waits, nothing changes
    assert sizes.previous == (8, 8)


def test_a_later_decision_replaces_one_that_waits():
    sizes = in_force()
    sizes.ask(Decision(global_batch=16))
    sizes.ask(Decision(shares=(3, 1)))  # of the batch asked for, not of the one in force
    assert sizes.pending == (10, 6)
    sizes.ask(Decision(global_batch=12, shares=(1, 1)))
    assert sizes.pending is None  # what is in force already has nothing to wait for


def test_where_every_size_is_compiled_a_later_decision_waits_behind_the_one_that_is_being_prepared():
    sizes = in_force()
    sizes.one_by_one = True
    for batch in (16, 14, 18):  # or one that comes in every step would put all of them off for ever
        sizes.ask(Decision(global_batch=batch))
        assert sizes.pending == (8, 8)
        assert sum(sizes.target) == batch
    sizes.step_done(apply=True)
    assert (sizes.current, sizes.pending, sizes.target) == ((8, 8), (9, 9), (9, 9))
    sizes.step_done(apply=True)
    assert (sizes.current, sizes.pending) == ((9, 9), None)
    sizes.ask(Decision(global_batch=10))
    sizes.ask(Decision(global_batch=12))
    sizes.ask(Decision(global_batch=10))  # it is being prepared already
    sizes.step_done(apply=True)
    assert (sizes.current, sizes.pending) == ((5, 5), None)
    sizes.ask(Decision(global_batch=12))
    sizes.ask(Decision(global_batch=10))  # what is in force already has nothing to wait for
    assert (sizes.pending, sizes.target) == (None, (5, 5))


def test_shares_stay_when_the_global_batch_changes():
    sizes = in_force(shares=(1, 2))
    sizes.ask(Decision(global_batch=6))
    assert sizes.pending == (2, 4)


@pytest.mark.parametrize("decision", [Decision(stop=True), Decision(notes=("seen",)), Decision(global_batch=11)])
def test_a_decision_that_asks_for_no_other_size_changes_no_split(decision):
    sizes = in_force(global_batch=11, upper=(20, 20, 20), shares=(1, 1, 1))
    sizes.current = (4, 4, 3)
    sizes.limits = sizes.limits._replace(quantum=4)
    sizes.ask(decision)
    assert sizes.target == (4, 4, 3)


@pytest.mark.parametrize(("asked", "taken"), [(1, 2), (0, 2), (1000, 20)])
def test_a_batch_out_of_range_is_clipped_with_a_note(asked, taken):
    sizes = in_force()
    (note,) = sizes.ask(Decision(global_batch=asked))
    assert note.startswith(f"global batch {asked} clipped to {taken}")
    assert sum(sizes.target) == taken


def test_the_data_set_bounds_the_batch():
    sizes = in_force(examples=15)
    assert sizes.most == 15
    sizes.ask(Decision(global_batch=18))
    assert sum(sizes.target) == 15


@pytest.mark.parametrize(
    ("global_batch", "wrong"),
    [
        (2.5, "whole number of examples; got 2.5"),
        (float("nan"), "whole number of examples; got nan"),
        (float("inf"), "whole number"),
        ("many", "whole number of examples; got 'many'"),
        (None, "whole number"),
        (True, "whole number of examples; got True"),
        (np.ones(2), "whole number"),
        (0, "positive; got 0"),
        (-4, "positive; got -4"),
        (1, "too small for 2 workers: each takes at least one example in a step, but for those whose share is 0"),
        (101, "larger than the data set, which has 100"),
        (21, "more than the 2 workers may take together: 20"),
    ],
)
def test_a_global_batch_that_cannot_be_is_refused(global_batch, wrong):
    with pytest.raises(ad.BatchSizeError, match=wrong):
        in_force(global_batch=global_batch)


@pytest.mark.parametrize("global_batch", [12, 12.0, np.int64(12), np.float32(12)])
def test_whole_numbers_of_any_kind_are_taken(global_batch):
    assert in_force(global_batch=global_batch).current == (6, 6)


def test_a_split_that_was_in_force_before_is_taken_up_again():
    sizes = in_force()
    sizes.ask(Decision(global_batch=16))
    sizes.restart((9, 5), (2, 1))
    assert sizes.shares == (2, 1)
    assert (sizes.current, sizes.previous, sizes.pending) == ((9, 5), (9, 5), None)
