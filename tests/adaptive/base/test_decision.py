"""Limits of a split, and the values cached from them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adaptive.base.decision import Limits

bounds = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=8)


@given(bounds)
def test_limits_of_workers_that_take_part_are_those_of_a_plain_loop(found):
    lower, more, there = zip(*found, strict=True)
    limits = Limits(lower, tuple(a + b for a, b in zip(lower, more, strict=True)), 2, 3)
    expected_lower = tuple(bound if own else 0 for bound, own in zip(limits.lower, there, strict=True))
    expected_upper = tuple(bound if own else 0 for bound, own in zip(limits.upper, there, strict=True))
    assert limits.of(there) == Limits(expected_lower, expected_upper, 2, 3)
    assert limits.of(there).active == tuple(i for i, most in enumerate(expected_upper) if most > 0)


def test_changed_limits_keep_nothing_of_the_old_ones():
    limits = Limits((1, 2, 0), (5, 6, 0), multiple=2)
    assert (limits.least, limits.most, limits.active) == (3, 10, (0, 1))
    assert [part.tolist() for part in limits.arrays] == [[1, 2, 0], [5, 6, 0], [0, 1]]
    wider = limits._replace(upper=(5, 6, 8), lower=(1, 2, 4))
    assert (wider.least, wider.most, wider.active) == (7, 18, (0, 1, 2))
    assert wider.arrays.active.tolist() == [0, 1, 2]
    assert type(wider) is Limits
    assert not any(part.flags.writeable for part in limits.arrays)
