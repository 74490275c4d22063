"""Splits by speed: LB-BSP on simulated workers, and in a program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from controllers.simulate import Cluster, jitter, simulate

from .problem import DATA, START, check_descent, descend

SPEED = np.array([1000.0, 500.0, 250.0])  # examples per second
predictors = pytest.mark.parametrize("predictor", [ctrl.published.arx, ctrl.published.narx], ids=["arx", "narx"])


@predictors
def test_workers_of_steady_speeds_get_batches_in_their_proportion(predictor):
    cluster = Cluster(ctrl.timing.BatchTime(1 / SPEED, np.zeros(3)), noise=jitter(0.01))
    found = simulate(ctrl.published.lb_bsp(predictor()), cluster, sizes=252, steps=400, every=5, seed=1)
    assert (found.global_batch == 252).all()
    assert found.over_ideal[0] > 1.2
    assert found.over_ideal[-50:].mean() < 1.06


@predictors
def test_speeds_are_predicted_from_free_resources(predictor):
    """A split by predicted speeds is better than one by past speeds where a measured share of the processor jumps."""
    rng, n, steps = np.random.default_rng(0), 3, 300
    share = np.ones((steps + 2, n))
    for step in range(1, steps + 2):
        share[step] = np.where(rng.random(n) < 0.05, rng.uniform(0.2, 1, n), share[step - 1])

    def mean_step(policy, values):
        found = simulate(policy, lambda step, sizes: sizes / (1e3 * share[step]), [128] * n, steps, values=values)
        return found.step_seconds[150:].mean()

    informed = mean_step(
        ctrl.published.lb_bsp(predictor(), n_inputs=1), lambda step, seconds: (seconds, share[step + 1])
    )
    past = ctrl.published.moving_average(), ctrl.published.memoryless()
    blind = [mean_step(ctrl.published.lb_bsp(rule), lambda step, seconds: (seconds,)) for rule in past]
    assert informed < 0.97 * min(blind)


def test_a_program_splits_by_the_seconds_that_its_hook_receives(devices):
    """Made-up seconds: worker i needs i + 1 times as long for an example. The gradient stays that of all examples."""

    def driver(w, batch):
        slowness = jnp.asarray([1e-3, 2e-3, 4e-3], jnp.float64)[ad.worker_index()]
        seconds = comm.all_gather(slowness * ad.batch_size().astype(jnp.float64))
        ctrl.hook(ctrl.published.lb_bsp(ctrl.published.moving_average()), seconds, every=3)
        return descend(w, batch)

    with ad.Program(driver, START, DATA, global_batch=42, world=devices, deterministic=True) as program:
        reports = list(program.run(steps=10))
        check_descent(program.state, reports)
    assert reports[0].batch_sizes == (14, 14, 14)
    np.testing.assert_allclose(reports[-1].batch_sizes, [24, 12, 6], atol=1)
