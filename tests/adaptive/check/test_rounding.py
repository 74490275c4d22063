"""Differences of two trials count if they exceed what rounding explains, for the whole array or for one element."""

from __future__ import annotations

import numpy as np

from adaptive.check.rounding import ROUNDING, beyond, differences, is_noisy

EPS = float(np.finfo(np.float32).eps)


def test_values_that_are_not_finite_in_both_trials_are_equal():
    a, b = np.array([np.nan, np.inf, 1.0, np.inf]), np.array([np.nan, np.inf, 3.0, 1.0])
    assert differences(a, b).tolist() == [0.0, 0.0, 2.0, np.inf]


def found(gaps, value, *, floor=0.0):
    gaps, value = np.asarray(gaps), np.asarray(value)
    return beyond(gaps, value, ROUNDING * EPS * value, floor)


def test_a_difference_within_the_tolerance_is_rounding():
    assert found([50 * EPS, 0.0], [1.0, 1.0]) is None
    assert np.isclose(found([1000 * EPS, 0.0], [1.0, 0.0]), 1000 * EPS)


def test_one_element_counts_beside_a_much_larger_one():
    assert np.isclose(found([1e-2, 0.0], [1.0, 1e4]), 1e-2)


def test_measured_rounding_errors_raise_the_tolerance_of_their_element():
    gaps, value = [0.01, 0.0], [1.0, 1.0]
    assert found(gaps, value, floor=np.array([0.001, 0.0])) is None
    assert np.isclose(found(gaps, value, floor=np.array([1e-9, 0.002])), 0.01)


def test_a_difference_from_finite_to_infinite_always_counts():
    assert found([np.inf], [1.0]) == np.inf


def test_a_value_is_noisy_if_rounding_moves_it_by_more_than_three_percent():
    value = np.array([1.0, 1.0])
    assert is_noisy(value, 0.05 * value)
    assert not is_noisy(value, 0.01 * value)
