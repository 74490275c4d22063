"""The noise scale and what follows it: batch, learning rate, workers; hyperparameters; sizes that cause no stall."""

from __future__ import annotations

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from tests.speed import limit

from .problem import (
    DATA,
    EXAMPLES,
    RATE,
    START,
    check_descent,
    descend,
    gradient,
    mean_loss,
    plain_descent,
    rows_of,
    taken,
)

# --- the noise scale --------------------------------------------------------------------------------------------------


def test_the_noise_scale_of_one_step_is_the_analysis_of_variance_of_uneven_groups(devices):
    def driver(w, batch):
        grads = jax.grad(mean_loss)(w, batch)
        avg_grads = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, avg_grads)
        return w, {"noise": noise, "avg": avg_grads, "of workers": comm.all_gather(grads)}

    with ad.Program(driver, START, DATA, global_batch=12, world=devices, shares=[1, 3, 2], resizable=False) as program:
        metrics = jax.tree.map(np.asarray, program.step().metrics)
    sizes, groups, mean = np.array([2, 6, 4]), metrics["of workers"], metrics["avg"]
    trace = (sizes @ (groups**2).sum(1) - 12 * mean @ mean) / (3 - 1)
    signal = mean @ mean - trace / 12
    noise = metrics["noise"]
    np.testing.assert_allclose([noise.trace, noise.signal], [trace, signal], rtol=1e-10)
    np.testing.assert_allclose(noise.scale, trace / signal, rtol=1e-10)


def test_the_noise_scale_of_uneven_batches_is_unbiased_and_within_its_bounds(devices):
    """At fixed parameters, against the covariance of all examples' gradients."""
    w = np.array([3.0, -1.0, 2.0])

    def driver(state, batch):
        grads = jax.grad(mean_loss)(state, batch)
        noise = mon.noise_scale(grads, comm.all_reduce(grads), decay=0.999, confidence=0.99)
        return state, {"noise": noise}

    # Examples drawn with replacement, so that batches are independent.
    drawn = {name: leaf[np.random.default_rng(2).integers(EXAMPLES, size=24_000)] for name, leaf in DATA.items()}
    options = {"world": devices, "resizable": False, "shares": [1, 3, 8], "microbatch": 4}
    with ad.Program(driver, w, drawn, global_batch=48, **options) as program:
        for _ in range(300):
            noise = jax.tree.map(float, program.step().metrics["noise"])
    of_examples = np.array([gradient(w, np.array([row])) for row in range(EXAMPLES)])
    true_trace, true_mean = of_examples.var(0).sum(), of_examples.mean(0)
    true_scale = true_trace / (true_mean @ true_mean)
    np.testing.assert_allclose(noise.trace, true_trace, rtol=0.06)
    np.testing.assert_allclose(noise.scale, true_scale, rtol=0.1)
    assert noise.lower < true_scale < noise.upper
    assert noise.upper < 1.5 * noise.lower


def test_the_noise_scale_of_single_examples(devices):
    def driver(w, batch):
        _, grads, norms = mon.example_norms(mean_loss)(w, batch)
        return w, {"noise": mon.noise_scale(grads, comm.all_reduce(grads), per_example=norms), "taken": taken(batch)}

    with ad.Program(driver, START, DATA, global_batch=12, world=devices, shares=[1, 3, 2], resizable=False) as program:
        metrics = jax.tree.map(np.asarray, program.step().metrics)
    of_examples = np.array([gradient(START, np.array([row])) for row in rows_of(metrics["taken"])])
    np.testing.assert_allclose(metrics["noise"].trace, of_examples.var(0, ddof=1).sum(), rtol=1e-10)


# --- what follows it --------------------------------------------------------------------------------------------------


def known_noise(scale, lower, upper):
    """A noise scale as a driver passes it to a hook."""
    fields = {"scale": scale, "trace": scale, "signal": 1.0, "lower": lower, "upper": upper}
    return mon.NoiseScale(**{name: jnp.asarray(value, jnp.float64) for name, value in fields.items()})


def test_the_batch_follows_the_bounds_of_the_noise_scale(devices):
    def driver(w, batch):
        shrinks = w[0] < -10  # false
        noise = known_noise(jnp.where(shrinks, 1.0, 40.0), 30.0, 50.0)
        ctrl.hook(ctrl.noise_batch(max_batch=36, growth=2.0, multiple=3), noise, every=2)
        return descend(w, batch)

    with ad.Program(driver, START, DATA, global_batch=6, world=devices, deterministic=True) as program:
        reports = list(program.run(steps=9))
        check_descent(program.state, reports)
    assert [report.global_batch for report in reports] == [6, 6, 12, 12, 24, 24, 30, 30, 30]


def test_the_learning_rate_follows_the_batch(devices):
    tx = optax.chain(optax.sgd(RATE), ctrl.scale_by_batch("linear", base=12))
    adascale = ctrl.scale_by_batch("adascale", base=12)

    def driver(state, batch):
        w, opt_state = state
        grads = comm.all_reduce(jax.grad(mean_loss)(w, batch))
        updates, opt_state = tx.update(grads, opt_state, w)
        one, _ = adascale.update(jnp.ones(()), adascale.init(w), noise=known_noise(36.0, 30.0, 50.0))
        ctrl.hook(ctrl.schedule({0: 12, 2: 24}))
        return (optax.apply_updates(w, updates), opt_state), {"taken": taken(batch), "adascale": one}

    state = (jnp.asarray(START), tx.init(jnp.asarray(START)))
    with ad.Program(driver, state, DATA, global_batch=12, world=devices, deterministic=True) as program:
        reports = list(program.run(steps=5))
        w = np.asarray(program.state[0])
    assert [report.global_batch for report in reports] == [12, 12, 24, 24, 24]
    rates = [RATE * report.global_batch / 12 for report in reports]
    expected = plain_descent([report.metrics["taken"] for report in reports], rates=rates)
    np.testing.assert_allclose(w, expected, rtol=0, atol=1e-6)  # the factor is in single precision
    gains = [float(report.metrics["adascale"]) for report in reports]
    np.testing.assert_allclose(gains, [1.0, 1.0] + 3 * [(36 / 12 + 1) / (36 / 24 + 1)], rtol=1e-6)


def test_the_number_of_workers_follows_the_noise_scale():
    with comm.DeviceWorld(jax.local_devices()[:3], workers=1) as world:

        def driver(w, batch):
            ctrl.hook(ctrl.noise_workers(8), known_noise(24.0, 22.0, 26.0), every=2)
            return descend(w, batch)

        with ad.Program(driver, START, DATA, global_batch=8, world=world, deterministic=True) as program:
            reports = list(program.run(steps=10))
            check_descent(program.state, reports)
    assert reports[0].members == (0,)
    assert reports[-1].members == (0, 1, 2)
    assert reports[-1].batch_sizes == (8, 8, 8)


def test_hyperparameters_set_by_hooks_are_in_force_in_the_next_step_and_compile_nothing(devices):
    traces = []

    def decay(control):
        control.set_hyperparameters(lr=control.hyperparameters["lr"] / 2)

    def driver(w, batch):
        traces.append(1)
        grads = comm.all_reduce(jax.grad(mean_loss)(w, batch))
        ctrl.hook(decay, every=2)
        return w - ad.hyperparameter("lr", 0.2) * grads, {"taken": taken(batch)}

    with ad.Program(driver, START, DATA, global_batch=12, world=devices, resizable=False) as program:
        first = program.step()
        number = len(traces)
        reports = [first, *program.run(steps=4)]
        assert len(traces) == number
        assert {report.kernels for report in reports[1:]} == {first.kernels}
        w = np.asarray(program.state)
    rates = [float(report.hyperparameters["lr"]) for report in reports]
    np.testing.assert_allclose(rates, [0.2, 0.2, 0.1, 0.1, 0.05], rtol=1e-6)
    np.testing.assert_allclose(
        w, plain_descent([report.metrics["taken"] for report in reports], rates=rates), rtol=0, atol=1e-12
    )


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.environ.get("TESTS_COMPILER") == "quick", reason="steps wait for the compiler by request")
def test_a_size_is_in_force_only_when_its_kernel_is_ready_and_no_step_waits(devices):
    """A whole batch needs a kernel for each size. Its trace is held back while steps go on."""
    held, threads = threading.Event(), set()
    held.set()

    def driver(w, batch):
        threads.add(threading.current_thread())
        held.wait(limit(30))
        parts = ad.minibatches(batch, 2)
        w, _ = jax.lax.scan(lambda w, part: (w - RATE * jax.grad(mean_loss)(w, part), None), w, parts)
        return comm.all_reduce(w), {"taken": taken(batch)}

    with ad.Program(driver, START, DATA, global_batch=6, world=devices) as program:
        program.warm_up()
        program.step()
        threads.clear()
        held.clear()
        try:
            program.rescale(global_batch=24)
            before = [program.step() for _ in range(20)]
            assert threading.main_thread() not in threads
        finally:
            held.set()
        program.warm_up()
        after = [program.step() for _ in range(3)]
    assert {report.batch_sizes for report in before} == {(2, 2, 2)}
    assert len({report.waited_seconds for report in before}) == 1
    assert after[-1].batch_sizes == (8, 8, 8)
