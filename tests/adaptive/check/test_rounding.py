"""Differences of two trials count if they exceed what rounding explains, for the whole array or for one element."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
from adaptive.check.influence import Influence
from adaptive.check.rounding import Precisions, RoundingErrors, beyond, differences, is_noisy
from adaptive.check.trials import outputs_of
from adaptive.check.widen import DOUBLE, SINGLE, Width, widened
from tests.adaptive import drivers

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
    assert not is_noisy(value, 1e4 * value, 1e-3, 500 * value)


HALF = float(jnp.finfo(jnp.bfloat16).eps)


def precisions_of(value, width=None, *, op="mean", state=0.0):
    """Return the precisions of a mean of what is computed from a batch, and of the state that follows it."""

    def driver(state, batch):
        return state - comm.all_reduce(value(batch), op=op), {"steps": ad.step_number()}

    planner = drivers.planner(driver, state)
    own = planner.begin(4)
    if width is None:
        plan = own
    else:
        with width.settings():
            plan = widened(planner, width).reference
    found = Precisions(plan, Influence(plan), outputs_of(plan), own)
    return found.of_place((0, 0)), found.outputs


def halves(batch):
    return (batch["y"].astype(jnp.bfloat16) * 3).mean().astype(jnp.float32)


def test_a_tolerance_goes_by_the_drivers_precision_and_measured_errors_by_that_of_the_trials():
    """At most by single precision, since half a value's digits would hide any difference."""
    assert precisions_of(lambda b: b["y"].mean()) == ((EPS, EPS), [(EPS, EPS), (0.0, 0.0)])
    assert precisions_of(lambda b: (b["y"] > 0).sum(), op="sum", state=0) == ((0.0, 0.0), [(0.0, 0.0)] * 2)
    assert precisions_of(halves) == ((HALF, HALF), [(HALF, HALF), (0.0, 0.0)])
    assert precisions_of(halves, Width(SINGLE)) == ((EPS, EPS), [(EPS, EPS), (0.0, 0.0)])
    double = float(np.finfo(np.float64).eps)
    for value in (halves, lambda b: b["y"].mean()):
        assert precisions_of(value, Width(DOUBLE)) == ((EPS, double), [(EPS, double), (0.0, 0.0)])


def test_rounding_errors_are_the_largest_of_all_trials():
    def result(*values):
        contributions = {(0, i): np.array(v) for i, v in enumerate(values)}
        return SimpleNamespace(contributions=contributions, outputs=[np.array(v) for v in values])

    errors, reference = RoundingErrors(), result([1.0, 2.0], [3.0])
    errors.add(reference, result([1.5, 2.0], [3.0]))
    errors.add(reference, result([1.0, 1.0], [7.0]), outputs=False)
    errors.add(reference, result([1.25, 2.5], [2.0]))
    assert {place: e.tolist() for place, e in errors.contributions.items()} == {(0, 0): [0.5, 1.0], (0, 1): [4.0]}
    assert {k: e.tolist() for k, e in errors.outputs.items()} == {0: [0.5, 0.5], 1: [1.0]}
