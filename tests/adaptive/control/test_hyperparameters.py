"""Hyperparameters that a schedule sets, in a program."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
from adaptive.runtime.local_world import LocalWorld
from tests.problems import build

EXAMPLES = 96


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
