"""Short steps are added up to stretches, which are looked at as one."""

from __future__ import annotations

import numpy as np
import pytest

import controllers as ctrl
from controllers.timing.stretch import Stretch
from tests.controllers.observations import observe


def looks_of(steps, enough):
    """The looks at steps, which are `(sizes, seconds)`."""
    stretch, looks = Stretch.init(2), []
    for sizes, seconds in steps:
        stretch, ended = stretch.add(sizes, np.asarray(seconds, float), enough)
        looks += ended
    return looks


def test_short_steps_are_added_up_and_looked_at_as_their_mean():
    steps = [((4, 4), (0.01, 0.02)), ((4, 4), (0.02, 0.01)), ((4, 4), (0.03, 0.01)), ((4, 4), (0.01, 0.01))]
    first, second = looks_of(steps[1:2] * 1 + steps, 0.04)
    assert (first.steps, first.sizes.tolist()) == (2, [4, 4])  # the very first step is left out
    np.testing.assert_allclose(first.seconds, [0.015, 0.015])
    assert first.slowest == pytest.approx(0.02)
    assert second.steps == 2


def test_a_change_of_sizes_ends_a_stretch_and_its_first_step_is_left_out():
    steps = [((4, 4), (0.01, 0.01))] * 3 + [((5, 3), (9e-3, 0.02))] + [((5, 3), (0.01, 0.01))] * 3
    first, second = looks_of(steps, 0.03)
    assert (first.sizes.tolist(), first.steps) == ([4, 4], 2)
    assert (second.sizes.tolist(), second.steps) == ([5, 3], 3)
    np.testing.assert_allclose(second.seconds, [0.01, 0.01])


def test_a_long_step_is_a_stretch_even_at_new_sizes():
    looks = looks_of([((4, 4), (0.1, 0.2)), ((5, 3), (0.1, 0.2))], 0.1)
    assert [(look.steps, look.sizes.tolist()) for look in looks] == [(1, [4, 4]), (1, [5, 3])]


def test_unknown_values_are_left_out_of_a_mean():
    steps = [((4, 4), (0.01, 0.01)), ((4, 4), (np.nan, 0.02)), ((4, 4), (0.03, 0.04)), ((4, 0), (0.03, np.nan))]
    (look, *_) = looks_of(steps, 1.0)
    np.testing.assert_allclose(look.seconds, [0.03, 0.03])
    for unknown in (np.nan, np.inf, 0.0, -1.0):
        (look,) = looks_of([((4, 4), (0.03, unknown))] * 4, 0.09)
        np.testing.assert_allclose(look.seconds, [0.03, np.nan])


def test_a_policy_decides_every_25_ms_for_any_step_time():
    for seconds, looks in ((1e-3, 3), (5e-3, 19), (0.025, 100)):
        policy = ctrl.balance()
        state = policy.init(2)
        for step in range(1, 101):
            _, state = policy.update(
                observe(np.array([seconds, seconds]), step=step, batch_sizes=(8, 8), due=step % 10 == 0), state
            )
        assert state.model.stay.max() + 1 == looks  # the first is left out
