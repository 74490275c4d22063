"""Measurements of a split's pace."""

from __future__ import annotations

import numpy as np

from controllers.policies.probation import Pace

SPLIT, OTHER = np.array([8, 8]), np.array([12, 4])


def test_a_pace_is_the_mean_of_all_looks_at_one_split():
    pace = Pace.init(2).see(SPLIT, 1.0).see(SPLIT, 3.0)
    assert (int(pace.looks), float(pace.mean), float(pace.variance)) == (2, 2.0, 1.0)


def test_a_look_at_another_split_starts_over_and_counts():
    pace = Pace.init(2).see(SPLIT, 9.0).see(OTHER, 1.0).see(OTHER, 3.0)
    assert pace.sizes.tolist() == OTHER.tolist()
    assert (int(pace.looks), float(pace.mean), float(pace.variance)) == (2, 2.0, 1.0)
