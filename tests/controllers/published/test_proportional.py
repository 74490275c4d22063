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


def test_an_upper_bound_is_learnt_where_throughput_drops():
    def thrashes(b):
        return np.where(b > 110, 2.0, 1.0) * b / CORES  # all workers, from 110 examples on

    policy = ctrl.published.proportional()
    sim = simulate(policy, lambda _, b: thrashes(b), [64, 64, 64], 400, every=10)
    assert sim.sizes[:, 2].max() > 110
    assert sim.sizes[-1, 2] == 64  # what it had before
    assert path(ctrl.published.proportional(drop=None), thrashes, [64] * 3, 400, every=10)[-1][2] > 64


@pytest.mark.parametrize("wrong", [{"dead_band": -0.1}, {"smoothing": 1.1}, {"window": 0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        ctrl.published.proportional(**wrong)
