"""The pace of a machine's steps: constant, drifting or jumping; pauses do not change it."""

from __future__ import annotations

import numpy as np
import pytest

from controllers.timing.pace import Pace


def follow(paces, noise=0.05, seed=0):
    """Take in steps at these true paces in turn (relative seconds), under noise; the state after each."""
    rng, pace, states = np.random.default_rng(seed), Pace.init(1), []
    for true in paces:
        step = np.log(np.array([true]) * (1 + noise * rng.standard_normal(1)))
        pace = pace.judge(step)
        surprise = np.expm1(step - pace.after(1))
        pace = pace.learn_noise(step, step, np.array([True])).learn(step, pace.jumps(surprise))
        states.append(pace)
    return states


def says(pace):
    return float(np.exp(pace.after(1))[0])


@pytest.mark.parametrize("seed", range(3))
def test_a_pace_that_stays_is_known_to_its_mean(seed):
    states = follow([1.0] * 400, seed=seed)
    assert np.mean([state.unsettled.any() for state in states]) < 0.2  # noise may look like a drift for a while
    assert says(states[-1]) == pytest.approx(1, abs=4 * 0.05 / np.sqrt(100))
    assert states[-1].variance[0] == pytest.approx(states[-1].noise[0] ** 2 / 100)
    assert states[-1].noise[0] == pytest.approx(0.05, rel=0.4)


@pytest.mark.parametrize("rate", [0.01, -0.01])
def test_a_drift_is_followed_by_its_trend_and_forgotten_when_it_ends(rate):
    true = np.concatenate([np.ones(50), np.exp(rate * np.arange(100)), np.full(300, np.exp(100 * rate))])
    states = follow(true)
    errors = np.array([says(state) / t - 1 for state, t in zip(states[:-1], true[1:], strict=True)])
    slow = np.cumsum(true) / np.arange(1, len(true) + 1)
    assert np.abs(errors[80:149]).max() < 0.15
    assert np.abs(errors[90:149].mean()) < 0.015  # a mean of the last steps alone lags behind by two or three
    assert np.abs(slow[149] / true[149] - 1) > 0.25
    assert states[140].unsettled.all()
    assert not states[-1].unsettled.any()
    assert np.abs(errors[-50:]).max() < 0.03


def test_a_jump_is_followed_at_once_and_a_pause_is_taken_back():
    states = follow([1.0] * 50 + [2.0] * 20, seed=1)
    assert says(states[50]) == pytest.approx(2, rel=0.2)
    assert states[50].without_jumps(states[50].jumped).after(1) == states[49].after(1)
    assert states[51].trust == states[49].trust == 1
    assert says(states[-1]) == pytest.approx(2, rel=0.05)

    states = follow([1.0] * 50 + [5.0] + [1.0] * 20, seed=1)
    assert says(states[50]) == pytest.approx(5, rel=0.2)
    assert says(states[51]) == pytest.approx(1, rel=0.05)
    assert states[51].steps == 51
    assert states[51].trust < 1


def test_jumps_again_and_again_leave_a_pace_unsettled():
    assert follow(np.repeat(np.where(np.arange(12) % 2, 2.0, 1.0), 20))[-1].unsettled.all()
    assert not follow([1.0] * 100 + [2.0] * 100)[-1].unsettled.any()


def test_missing_values_change_nothing():
    before, nothing = follow([1.0] * 20)[-1], np.array([np.nan])
    after = before.judge(nothing).learn_noise(nothing, nothing, np.array([True])).learn(nothing, np.array([False]))
    for name, a, b in zip(Pace._fields, before, after, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
