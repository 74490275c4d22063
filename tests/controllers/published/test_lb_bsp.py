"""`lb_bsp`: splits by predicted speeds, and refuses inputs that it was not made for."""

from __future__ import annotations

import numpy as np
import pytest

import controllers as ctrl
from adaptive.base.errors import DriverError
from controllers.simulate import simulate
from tests.controllers.observations import path

CORES = np.array([3.0, 5.0, 12.0])


def test_lb_bsp_splits_by_speed():
    assert path(ctrl.published.lb_bsp(), lambda b: b / CORES, [64, 64, 64], 50) == [[64, 64, 64], [29, 48, 115]]


@pytest.mark.parametrize("predictor", [ctrl.published.arx(), ctrl.published.narx()], ids=["arx", "narx"])
def test_lb_bsp_follows_processor_shares_better_than_past_speeds(predictor):
    rng = np.random.default_rng(0)
    steps, n = 600, 4
    jumps = rng.random((steps, n)) < 0.04
    share = np.ones((steps + 2, n))
    for k in range(1, steps + 2):
        share[k] = np.where(jumps[k % steps], rng.uniform(0.2, 1, n), share[k - 1])

    def mean_step(policy, values):
        sim = simulate(policy, lambda step, b: b / (1e3 * share[step]), [128] * n, steps, values=values)
        return sim.step_seconds[200:].mean()

    # Measured after the step, for the next one: the program's own inputs are of the step before.
    informed = mean_step(ctrl.published.lb_bsp(predictor, n_inputs=1), lambda step, t: (t, share[step + 1]))
    blind = mean_step(ctrl.published.lb_bsp(ctrl.published.moving_average()), lambda step, t: (t,))
    assert informed < blind


def test_lb_bsp_warns_of_unsuitable_inputs():
    check = ctrl.published.lb_bsp(n_inputs=1).check
    with pytest.raises(ValueError, match="n_inputs=2"):
        check((np.ones(2), np.ones(2), np.ones(2)), 2, "lb_bsp")
    with pytest.raises(DriverError, match="after the times"):
        check((np.ones(2), np.ones(3)), 2, "lb_bsp")


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="must"):
        ctrl.published.lb_bsp(dead_band=-1)
