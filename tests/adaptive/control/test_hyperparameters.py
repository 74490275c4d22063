"""Hyperparameters that a schedule sets, and the measured seconds that reach hooks, in a program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.runtime.local_world import LocalWorld
from tests.problems import build, descend, make_data

EXAMPLES = 96


def test_real_seconds_reach_the_policy():
    """Measured ones, of which no more is known than that they are positive, each the one before's."""
    seen = []

    def driver(state, batch):
        seconds, iteration = comm.all_gather(mon.compute_seconds()), comm.all_reduce(mon.iteration_seconds(), op="max")
        ctrl.hook(lambda control, *given: seen.append(given), seconds, iteration)
        return descend(state, batch)

    with build(driver, 0.0, make_data(), 24, world=LocalWorld(3)) as program:
        reports = list(program.run(steps=4))
    assert np.isnan(seen[0][0]).all()
    for (seconds, iteration), before in zip(seen[1:], reports[:-1], strict=True):
        assert seconds.shape == (3,)
        assert ((seconds > 0) & (seconds < iteration)).all()
        np.testing.assert_allclose(seconds, before.compute_seconds, rtol=1e-6)


def test_a_cosine_over_epochs_is_not_cut_short_by_a_batch_that_grows():
    schedule = optax.cosine_decay_schedule(1.0, decay_steps=2)

    def driver(state, batch):
        lr = ad.hyperparameter("lr", 1.0)
        ctrl.hook(lambda control: control.rescale(global_batch=2 * control.global_batch), every=4)
        ctrl.hook(ctrl.schedule(by="epochs", lr=schedule))
        return state + comm.all_reduce(batch["x"].mean()), {"lr": lr}

    data, consumed = {"x": np.arange(EXAMPLES, dtype=np.float32)}, 0
    options = {"world": LocalWorld(3), "deterministic": True, "resizable": True}
    with build(driver, jnp.zeros(()), data, 6, **options) as program:
        for report in program.run(epochs=2):
            assert float(report.metrics["lr"]) == pytest.approx(float(schedule(consumed / EXAMPLES)), abs=1e-6)
            consumed = report.examples
        assert program.hyperparameters["lr"] == pytest.approx(0, abs=1e-6)
