"""`proportional`: as it was published, and renormalized."""

from __future__ import annotations

import numpy as np
import pytest

import controllers as ctrl
from controllers.published._proportional import proportional_step
from controllers.simulate import simulate
from tests.controllers.observations import path

CORES = np.array([3.0, 5.0, 12.0])


def test_as_published_one_step_inflates_the_global_batch():
    sizes = proportional_step(np.full(3, 64.0), 64 / CORES)
    np.testing.assert_allclose(sizes, [39.47, 65.78, 157.87], atol=0.01)
    assert sizes.sum() / 192 == pytest.approx((1 / CORES).mean() * CORES.mean())  # 1.370
    published = ctrl.published.proportional(renormalize=False)
    assert path(published, lambda b: b / CORES, [64, 64, 64], 100, every=10)[1] == [39, 66, 158]


def test_renormalized_it_is_there_in_one_step():
    sizes = proportional_step(np.full(3, 64.0), 64 / CORES)
    np.testing.assert_allclose(sizes * 192 / sizes.sum(), [28.8, 48, 115.2])
    assert path(ctrl.published.proportional(), lambda b: b / CORES, [64, 64, 64], 100, every=10) == [
        [64, 64, 64],
        [29, 48, 115],
    ]


def test_renormalized_it_is_the_rule_of_dbs():
    rng = np.random.default_rng(0)
    sizes, seconds = rng.uniform(10, 100, 6), rng.uniform(0.1, 1, 6)
    step = proportional_step(sizes, seconds)
    np.testing.assert_allclose(step / step.sum(), (sizes / seconds) / (sizes / seconds).sum())


def test_with_a_fixed_cost_the_error_shrinks_by_its_share():
    """c / T* = 2 / 11.6 of it is left after a step: 51.2, 9.1, 1.53, .26, .045."""
    sizes, off = np.full(3, 64.0), []
    for _ in range(5):
        off.append(np.abs(sizes - [28.8, 48, 115.2]).max())
        sizes = proportional_step(sizes, 2 + sizes / CORES)
        sizes *= 192 / sizes.sum()
    np.testing.assert_allclose(off, [51.2, 9.1, 1.53, 0.26, 0.045], rtol=0.03)


def test_an_upper_bound_is_learnt_where_throughput_drops():
    def thrashes(b):
        return np.where(b > 110, 2.0, 1.0) * b / CORES  # all workers, from 110 examples on

    policy = ctrl.published.proportional()
    sim = simulate(policy, lambda _, b: thrashes(b), [64, 64, 64], 400, every=10)
    assert sim.sizes[:, 2].max() > 110
    assert sim.sizes[-1, 2] == 64  # what it had before
    assert path(ctrl.published.proportional(drop=None), thrashes, [64] * 3, 400, every=10)[-1][2] > 64


def test_a_flat_slow_worker_collapses():
    """Why `balance` exists."""
    flat = ctrl.timing.BatchTime(np.array([0.05, 0.1, 0.1, 0.1]), 0.0, np.array([20.0, 0, 0, 0]))
    tried = path(ctrl.published.proportional(), flat, [100] * 4, 400, every=10)
    assert [sizes[0] for sizes in tried[:4]] == [100, 57, 34, 22]
    assert tried[-1][0] < 5
    assert flat(tried[-1]).max() == flat(tried[0]).max()


@pytest.mark.parametrize("wrong", [{"dead_band": -0.1}, {"smoothing": 1.1}, {"window": 0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        ctrl.published.proportional(**wrong)
