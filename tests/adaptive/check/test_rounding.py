"""Differences of two trials count if they exceed what rounding explains, for the whole array or for one element."""

from __future__ import annotations

import numpy as np

from adaptive.check.rounding import beyond, differences, is_noisy

EPS = float(np.finfo(np.float32).eps)


def test_values_that_are_not_finite_in_both_trials_are_equal():
    a, b = np.array([np.nan, np.inf, 1.0, np.inf]), np.array([np.nan, np.inf, 3.0, 1.0])
    assert differences(a, b).tolist() == [0.0, 0.0, 2.0, np.inf]


def found(gaps, value, *, floor=None, precisions=(EPS, EPS), by_element=True):
    gaps, value = np.asarray(gaps), np.asarray(value)
    return beyond(gaps, value, 100 * EPS * value, precisions, floor, by_element=by_element)


def test_a_difference_within_the_tolerance_is_rounding():
    assert found([50 * EPS, 0.0], [1.0, 1.0]) is None
    assert np.isclose(found([1000 * EPS, 0.0], [1.0, 0.0]), 1000 * EPS)


def test_one_element_counts_beside_a_much_larger_one():
    gaps, value = [1e-2, 0.0], [1.0, 1e4]  # the norm allows 0.1
    assert np.isclose(found(gaps, value), 1e-2)
    assert found(gaps, value, by_element=False) is None


def test_measured_rounding_errors_raise_the_tolerance():
    gaps, value = [0.01, 0.01], [1.0, 1.0]
    assert np.isclose(found(gaps, value), 0.01)
    assert found(gaps, value, floor=np.array([0.001, 0.001])) is None
    assert np.isclose(found(gaps, value, floor=np.array([1e-6, 1e-6])), 0.01)


def test_each_element_has_its_own_tolerance_in_a_higher_precision_than_the_drivers():
    gaps, value, floor = [0.01, 0.0], [1.0, 1.0], np.array([1e-9, 0.002])
    double = float(np.finfo(np.float64).eps)
    assert found(gaps, value, floor=floor) is None  # in the driver's precision, the largest error counts for all
    assert np.isclose(found(gaps, value, floor=floor, precisions=(EPS, double)), 0.01)


def test_a_difference_from_finite_to_infinite_always_counts():
    assert found([np.inf], [1.0]) == np.inf


def test_a_value_is_noisy_if_rounding_moves_it_by_more_than_three_percent():
    value = np.array([1.0, 1.0])
    assert is_noisy(0.1 * value, value, 1e-5, 0.05 * value)
    assert not is_noisy(0.1 * value, value, 1e-5, 0.01 * value)
    assert not is_noisy(0.1 * value, value, 0.2, 0.05 * value)  # no difference to explain
