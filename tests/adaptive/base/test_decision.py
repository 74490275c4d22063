"""Limits of a split, and the values cached from them."""

from __future__ import annotations

from adaptive.base.decision import Limits


def test_changed_limits_keep_nothing_of_the_old_ones():
    limits = Limits((1, 2, 0), (5, 6, 0), multiple=2)
    assert (limits.least, limits.most, limits.active) == (3, 10, (0, 1))
    assert [part.tolist() for part in limits.arrays] == [[1, 2, 0], [5, 6, 0], [0, 1]]
    wider = limits._replace(upper=(5, 6, 8), lower=(1, 2, 4))
    assert (wider.least, wider.most, wider.active) == (7, 18, (0, 1, 2))
    assert wider.arrays.active.tolist() == [0, 1, 2]
    assert type(wider) is Limits
    assert not any(part.flags.writeable for part in limits.arrays)
