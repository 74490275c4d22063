"""The online model of step times: what it learns, and what does not fool it."""

from __future__ import annotations

import numpy as np

import controllers as ctrl

TRUE = ctrl.timing.BatchTime(np.array([1e-3, 2e-3, 5e-4]), np.array([0.02, 0.0, 0.05]), np.array([0.0, 0.0, 0.08]))


def run(model, sizes, steps, times=TRUE, jitter=0.05, seed=0):
    rng = np.random.default_rng(seed)
    sizes = np.asarray(sizes)
    for _ in range(steps):
        model = model.observe(sizes, times(sizes) * (1 + jitter * rng.standard_normal(len(sizes))))
    return model


def test_nothing_is_known_at_first():
    model = ctrl.timing.TimeModel.init(3)
    assert not model.measured.any()
    assert np.isnan(model.fit()(100)).all()


def test_one_size_makes_a_line_through_the_origin():
    model = run(ctrl.timing.TimeModel.init(3), [100, 100, 100], 20, jitter=0)
    np.testing.assert_allclose(model.fit()(50), TRUE(100) / 2)


def test_two_sizes_determine_the_intercept():
    model = run(ctrl.timing.TimeModel.init(2), [100, 100], 20, TRUE_LINES, 0.05)
    model = run(model, [50, 200], 20, TRUE_LINES, 0.05, seed=1)
    np.testing.assert_allclose(model.fit()(np.array([70, 150])), TRUE_LINES(np.array([70, 150])), rtol=0.04)


TRUE_LINES = ctrl.timing.BatchTime(TRUE.slope[:2], TRUE.intercept[:2])


def test_a_floor_is_seen_where_times_do_not_follow_sizes():
    floor = ctrl.timing.BatchTime(np.array([1e-3]), 0.0, np.array([0.08]))
    model = ctrl.timing.TimeModel.init(1)
    for size in (30, 60, 160, 200):
        model = run(model, [size], 20, floor, 0.02)
    fit = model.fit()
    np.testing.assert_allclose(fit(20), 0.08, rtol=0.03)
    np.testing.assert_allclose(fit(180), 0.18, rtol=0.03)


def test_the_first_time_at_a_new_size_is_left_out():
    model = run(ctrl.timing.TimeModel.init(3), [100, 100, 100], 20, jitter=0)
    model = model.observe(np.array([100, 60, 100]), np.array([0.12, 9.0, 0.1]))
    assert model.left_out.tolist() == [False, True, False]
    np.testing.assert_allclose(model.fit()(np.array([100, 60, 100])), [0.12, 0.12, 0.1])
    model = model.observe(np.array([100, 60, 100]), np.array([0.12, 9.0, 0.1]))  # then it is slow
    assert not model.left_out.any()
    assert model.fit()(60)[1] > 1
    assert model.sizes.tolist() == [100, 60, 100]


def test_a_change_of_speed_is_followed_at_once_and_keeps_the_shape():
    model = run(ctrl.timing.TimeModel.init(3), [100, 100, 200], 20)
    model = run(model, [50, 200, 400], 20, seed=1)
    slowed = ctrl.timing.BatchTime(TRUE.slope * 2.5, TRUE.intercept * 2.5, TRUE.floor * 2.5)
    model = run(model, [50, 200, 400], 10, slowed, seed=2)
    sizes = np.array([80, 100, 300])
    np.testing.assert_allclose(model.fit()(sizes), slowed(sizes), rtol=0.06)
    assert model.pace.steps.max() <= 10


def test_shapes_are_not_learnt_while_speeds_drift():
    """Sizes are made to follow the drift, so that times stay: that is not a floor."""
    model = ctrl.timing.TimeModel.init(1)
    for k in range(300):
        slowness = np.exp(0.01 * max(k - 30, 0))
        size = max(round(1000 / slowness), 1) // 5 * 5 if k > 60 else 1000
        model = run(model, [size], 1, ctrl.timing.BatchTime(np.array([1e-3 * slowness])), seed=k)
    assert model.pace.unsettled.all()
    assert model.fit()(2 * size)[0] > 1.7 * model.present[0]


def test_a_ninth_size_replaces_the_farthest():
    floor, model = ctrl.timing.BatchTime(np.array([1e-3]), 0.01), ctrl.timing.TimeModel.init(1)
    sizes = [2**k for k in range(12)]
    for k, size in enumerate(sizes):
        model = run(model, [size], 10, floor, 0.01, seed=k)
    assert sorted(model.points[0, :, 0]) == sizes[-8:]
    np.testing.assert_allclose(model.fit()(1000), floor(1000), rtol=0.05)


def test_invalid_times_count_as_missing():
    model = ctrl.timing.TimeModel.init(4)
    model = model.observe(np.full(4, 100), np.full(4, 0.1))
    for wrong in (np.nan, np.inf, 0.0, -1.0):
        model = model.observe(np.full(4, 100), np.array([0.1, wrong, 0.1, wrong]))
    assert model.measured.tolist() == [True, False, True, False]
    np.testing.assert_allclose(model.fit()(100)[[0, 2]], 0.1)


def test_times_never_fall_as_batches_grow():
    rng = np.random.default_rng(0)
    model = ctrl.timing.TimeModel.init(50)
    for _ in range(30):
        sizes = rng.integers(1, 300, 50)
        for _ in range(3):
            model = model.observe(sizes, rng.uniform(0.01, 1.0, 50))
    fit = model.fit()
    assert (fit.slope >= 0).all()
    assert (fit(np.arange(50) + 1) > 0).all()
