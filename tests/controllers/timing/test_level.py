"""The level of a machine's step times: constant, drifting or jumping; pauses do not change it."""

from __future__ import annotations

import numpy as np
import pytest

from controllers.timing.level import Level


def follow(levels, noise=0.05, seed=0, model=None):
    """Take in steps at these true levels in turn (relative seconds), under noise; the model after each."""
    rng, model, models = np.random.default_rng(seed), model or Level.init(1), []
    for level in levels:
        step = np.log(np.array([level]) * (1 + noise * rng.standard_normal(1)))
        model = model.judge(step)
        surprise = np.expm1(step - model.after(1))
        model = model.learn_noise(step, step, np.array([True])).learn(step, model.jumps(surprise), due=True)
        models.append(model)
    return models


def says(model):
    return float(np.exp(model.after(1))[0])


@pytest.mark.parametrize("seed", range(5))
def test_a_level_that_stays_is_known_to_its_mean(seed):
    models = follow([1.0] * 400, seed=seed)
    assert not any(m.unsettled.any() for m in models)
    assert says(models[-1]) == pytest.approx(1, abs=4 * 0.05 / np.sqrt(200))
    assert models[-1].variance[0] == pytest.approx(models[-1].noise[0] ** 2 / 200, rel=0.02)
    assert models[-1].noise[0] == pytest.approx(0.05, rel=0.4)


@pytest.mark.parametrize("rate", [0.01, -0.01])
def test_a_drift_is_followed_by_its_trend_and_forgotten_when_it_ends(rate):
    true = np.concatenate([np.ones(50), np.exp(rate * np.arange(100)), np.full(300, np.exp(100 * rate))])
    models = follow(true)
    errors = np.array([says(m) / t - 1 for m, t in zip(models[:-1], true[1:], strict=True)])
    slow = np.cumsum(true) / np.arange(1, len(true) + 1)
    assert np.abs(errors[80:149]).max() < 0.15
    assert np.abs(errors[90:149].mean()) < 0.015  # a mean of the last steps alone lags behind by two or three
    assert np.abs(slow[149] / true[149] - 1) > 0.25
    assert models[140].unsettled.all()
    assert not models[-1].unsettled.any()
    assert np.abs(errors[-50:]).max() < 0.03


def test_a_jump_is_followed_at_once_and_a_pause_is_taken_back():
    models = follow([1.0] * 50 + [2.0] * 20)
    assert says(models[50]) == pytest.approx(2, rel=0.2)
    assert models[50].without_latest_jumps().after(1) == models[49].after(1)
    assert models[51].lasting == models[49].lasting == 1
    assert says(models[-1]) == pytest.approx(2, rel=0.05)

    models = follow([1.0] * 50 + [5.0] + [1.0] * 20)
    assert says(models[50]) == pytest.approx(5, rel=0.2)
    assert says(models[51]) == pytest.approx(1, rel=0.05)
    assert models[51].steps == 51
    assert models[51].lasting < 1


def test_jumps_again_and_again_leave_a_level_unsettled():
    levels = np.repeat(np.where(np.arange(12) % 2, 2.0, 1.0), 20)
    assert follow(levels)[-1].unsettled.all()
    assert not follow([1.0] * 100 + [2.0] * 100)[-1].unsettled.any()


def test_missing_values_change_nothing():
    before = follow([1.0] * 20)[-1]
    nothing = np.array([np.nan])
    after = (
        before.judge(nothing)
        .learn_noise(nothing, nothing, np.array([True]))
        .learn(nothing, np.array([False]), due=False)
    )
    for name, a, b in zip(Level._fields, before, after, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
