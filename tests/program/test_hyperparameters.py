"""Hyperparameters that hooks set, over every world as it stands: in force in the next step, and nothing is compiled."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl

COVERS = ("adaptive/control/hyperparameters.py", "adaptive/operators/hyperparameters.py")

EXAMPLES = 96


def data():
    return {"x": np.random.default_rng(0).normal(size=(EXAMPLES, 3)).astype(np.float32)}


def built(world, hook, *values, every=2, **options):
    def driver(state, batch):
        lr = ad.hyperparameter("lr", 0.5)
        scales = ad.hyperparameter("scales", [1.0, 2.0, 3.0])
        mean = comm.all_reduce(batch["x"].mean(0))
        tx = optax.sgd(lr)
        updates, _ = tx.update(mean * scales, tx.init(state))
        ctrl.hook(hook, *values, every=every)
        return state + updates, {"lr": lr, "lr again": ad.hyperparameter("lr", 0.5)}

    return ad.Program(driver, jnp.zeros(3), data(), global_batch=6 * world.size, world=world, **options)


def test_the_state_follows_the_values(world):
    def hook(control):
        control.set_hyperparameters(lr=control.step / 10, scales=[0.0, 1.0, control.step])

    with built(world, hook, every=1) as program:
        reports = list(program.run(steps=4))
        state = np.asarray(program.state)
    x, at, expected = data()["x"], 0, np.zeros(3)
    with built(world, lambda control: None) as reference:
        rows = [np.asarray(reference._parts.stream.peek(r.batch_sizes)["x"]) for r in reports[:1]]
    assert x.shape[0] >= len(rows[0])
    order = program._parts.stream.indices(0, sum(r.global_batch for r in reports))
    for k, report in enumerate(reports):
        lr, scales = (0.5, [1.0, 2.0, 3.0]) if k == 0 else (k / 10, [0.0, 1.0, float(k)])
        mean = x[order[at : at + report.global_batch]].mean(0)
        expected -= lr * np.array(scales) * mean
        at += report.global_batch
    np.testing.assert_allclose(state, expected, rtol=1e-5, atol=1e-6)


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
    with ad.Program(driver, jnp.zeros(3), data(), **options) as program:
        consumed = 0
        for report in program.run(epochs=2):
            assert float(report.metrics["lr"]) == pytest.approx(float(schedule(consumed / EXAMPLES)), abs=1e-6)
            consumed = report.examples
        assert program.hyperparameters["lr"] == pytest.approx(0, abs=1e-6)
