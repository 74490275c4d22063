"""Policies at work in a program: from what a step measures to the sizes of the next."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

from .problems import build, descend, make_data, same_everywhere

EXAMPLES = 96


def test_real_seconds_reach_the_policy(world):
    """Measured ones, of which no more is known than that they are positive, each the one before's."""
    seen = []

    def watch(control, seconds, iteration):
        seen.append((np.array(seconds), float(iteration)))

    def driver(state, batch):
        seconds = comm.all_gather(mon.compute_seconds())
        ctrl.hook(watch, seconds, comm.all_reduce(mon.iteration_seconds(), op="max"))
        return descend(state, batch)

    with build(driver, 0.0, make_data(), 24, world=world) as program:
        reports = list(program.run(steps=4))
    assert np.isnan(seen[0][0]).all()
    for (seconds, iteration), before in zip(seen[1:], reports[:-1], strict=True):
        assert seconds.shape == (world.size,)
        assert (seconds > 0).all()
        assert (seconds < iteration).all()
        mine = [seconds[w] for w in world.workers]
        np.testing.assert_allclose(mine, before.compute_seconds, rtol=1e-6)
    assert same_everywhere(world, [s for s, _ in seen[1:]])


def test_a_cosine_over_epochs_is_not_cut_short_by_a_batch_that_grows(world):
    schedule = optax.cosine_decay_schedule(1.0, decay_steps=2)

    def grow(control):
        control.rescale(global_batch=2 * control.global_batch)

    def driver(state, batch):
        lr = ad.hyperparameter("lr", 1.0)
        ctrl.hook(grow, every=4)
        ctrl.hook(ctrl.schedule(by="epochs", lr=schedule))
        return state + comm.all_reduce(batch["x"].mean(0)), {"lr": lr}

    options = {"global_batch": 2 * world.size, "world": world, "deterministic": True}
    with ad.Program(
        driver, jnp.zeros(3), {"x": np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)}, **options
    ) as program:
        consumed = 0
        for report in program.run(epochs=2):
            assert float(report.metrics["lr"]) == pytest.approx(float(schedule(consumed / EXAMPLES)), abs=1e-6)
            consumed = report.examples
        assert program.hyperparameters["lr"] == pytest.approx(0, abs=1e-6)
