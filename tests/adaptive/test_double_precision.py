"""Operators under `jax_enable_x64`, with parameters in single precision: they run, and keep the dtypes of a state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.runtime.local_world import LocalWorld
from tests.relaxed import relaxed_tx


@pytest.fixture(autouse=True)
def double_precision():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


DTYPE = "float32"  # parameters in double precision are those of tests/contract


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 4))
    return {"x": x.astype(DTYPE), "y": (x @ np.arange(4.0)).astype(DTYPE)}


def mean_loss(params, batch):
    return ((batch["x"] @ params - batch["y"]) ** 2).mean()


def run(driver, state, steps=6, **options):
    options = {"world": LocalWorld(3), "global_batch": 24, "shares": (3, 2, 1), "deterministic": True} | options
    before = [jnp.asarray(x).dtype for x in jax.tree.leaves(state)]
    with ad.Program(driver, state, data(), **options) as program:
        reports = [program.step() for _ in range(steps)]
        assert [x.dtype for x in jax.tree.leaves(program.state)] == before
    return reports


def test_a_learning_rate_rule_beside_all_monitors_and_a_policy():
    tx = relaxed_tx(optax.chain(optax.adam(0.01), ctrl.scale_by_batch("adascale", base=24, warmup=3)))

    def driver(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        avg_grads, loss = comm.all_reduce((grads, loss))
        noise = mon.noise_scale(grads, avg_grads)
        updates, opt_state = tx.update(avg_grads, opt_state, params, noise=noise)
        seconds = comm.all_gather(mon.compute_seconds())
        metrics = {
            "loss": mon.ema(loss, decay=0.9),
            "noise": noise.scale,
            "variance": mon.gradient_variance(grads, avg_grads),
            "norm": mon.gradient_norm(avg_grads),
            "nonfinite": mon.nonfinite(grads),
            "iteration": comm.all_reduce(mon.iteration_seconds(), op="max"),
            "cpu": comm.all_gather(mon.cpu_available()),
            "memory": comm.all_gather(mon.memory_available()),
        }
        ctrl.hook(ctrl.balance(), seconds, every=2)
        ctrl.hook(lambda control, scale: control.rescale(global_batch=24 + 6 * (control.step % 2)), noise.scale)
        return (optax.apply_updates(params, updates), opt_state), metrics

    params = jnp.zeros(4, DTYPE)
    reports = run(driver, (params, tx.init(params)))
    assert {report.global_batch for report in reports} == {24, 30}
    assert reports[-1].metrics["loss"] < reports[0].metrics["loss"]
    assert np.isfinite(reports[-1].metrics["noise"])


def test_all_operators_of_adaptive():
    def draws(key, shape):
        drawn = jax.random.normal(key, shape), jax.random.uniform(key, shape, jnp.float32), jax.random.bits(key, shape)
        return sum(x.astype(DTYPE).mean(0) for x in (*drawn, jax.random.bernoulli(key, 0.5, shape)))

    def driver(params, batch):
        examples, features = batch["x"].shape
        noise = draws(ad.batch_key(), (examples, features)) + draws(jax.random.split(ad.batch_key())[0], (examples, 1))
        noise += jax.vmap(lambda key: jax.random.normal(key, (features,), DTYPE))(ad.example_keys()).mean(0)
        noise = comm.all_reduce(noise.astype(DTYPE)) + draws(ad.step_key(), (3, features))
        grads = comm.all_reduce(jax.grad(mean_loss)(params, batch))
        own = comm.all_gather((ad.batch_size(), ad.worker_index(), ad.microbatch_size()))
        asked = ad.replicated(jax.pure_callback(lambda: np.float64(1), jax.ShapeDtypeStruct((), np.float64)))
        metrics = {
            "noise": noise.sum(),
            "own": own,
            "numbers": (ad.step_number(), ad.global_batch(), ad.num_workers(), ad.capacity()),
            "asked": asked,
        }
        return params - ad.hyperparameter("lr", 0.01).astype(DTYPE) * grads, metrics

    reports = run(driver, jnp.zeros(4, DTYPE), steps=2)
    assert np.isfinite(reports[-1].metrics["noise"])
    assert [int(n) for n in reports[-1].metrics["numbers"]] == [1, 24, 3, 3]
