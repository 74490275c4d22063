"""Gradients are exact on any split, other reductions are what they say, and what is not finite does no harm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm

from .problem import (
    DATA,
    EXAMPLES,
    RATE,
    START,
    check_descent,
    check_epochs,
    descend,
    gradient,
    mean_loss,
    one_worker,
    rows_of,
    taken,
)


def test_any_split_into_workers_and_microbatches_is_the_plain_loop(devices):
    rng = np.random.default_rng(1)
    options = {"world": devices, "deterministic": True, "microbatch": 3}
    with ad.Program(descend, START, DATA, global_batch=12, shares=[1, 3, 2], **options) as program:
        reports = []
        for _ in range(8):
            reports.append(program.step())
            shares = rng.multinomial(rng.integers(6, 24) - 3, [0.5, 0.3, 0.2]) + 1
            program.rescale(global_batch=int(shares.sum()), shares=shares.tolist())
        check_descent(program.state, reports)
    assert reports[0].batch_sizes == (2, 6, 4)
    assert len({report.batch_sizes for report in reports}) > 4
    state, examples = one_worker([report.global_batch for report in reports])
    np.testing.assert_allclose(program.state, state, rtol=0, atol=1e-12)
    np.testing.assert_array_equal([report.metrics["taken"] for report in reports], examples)


def test_check_approves_an_exact_driver_and_names_what_depends_on_the_split(devices):
    def mean_of_means(w, batch):
        grads = comm.all_reduce(jax.grad(mean_loss)(w, batch), weight=1)
        return w - RATE * grads, {}

    options = {"global_batch": 12, "world": devices, "resizable": False}
    with ad.Program(descend, START, DATA, **options) as exact, ad.Program(mean_of_means, START, DATA, **options) as off:
        found, wrong = exact.check(), off.check()
        np.testing.assert_array_equal(exact.state, START)  # unchanged
        assert exact.steps == 0
    assert found
    assert found.verdict == "yes"
    assert not wrong
    assert wrong.verdict == "no"
    assert wrong.differences


@pytest.mark.parametrize(
    "local",
    [
        lambda w, batch: jax.grad(mean_loss)(w, batch),
        lambda w, batch: comm.all_reduce(jax.grad(mean_loss)(w, batch), op="sum") / len(batch["x"]),
    ],
    ids=["not reduced", "divided by the local length"],
)
def test_a_state_that_would_differ_between_workers_is_refused(devices, local):
    with pytest.raises(ad.ReplicationError):
        ad.Program(lambda w, batch: (w - RATE * local(w, batch), {}), START, DATA, global_batch=12, world=devices)


def test_a_mean_in_the_model_is_over_the_whole_batch(devices):
    """As in batch normalization: `jax.lax.pmean` in the loss, differentiated."""

    def normalized_loss(w, batch, mean):
        x = batch["x"] * w[None]
        center = mean(x)
        variance = mean((x - center[None]) ** 2)
        return (((x - center[None]) / jnp.sqrt(variance + 1e-3)[None]).sum(1) * batch["y"] * 0.1).mean()

    def over_all(x):
        return jax.lax.pmean(x.mean(0), "workers")

    def driver(w, batch):
        grads = comm.all_reduce(jax.grad(lambda w: normalized_loss(w, batch, over_all))(w))
        return w - RATE * grads, {"taken": taken(batch)}

    with ad.Program(
        driver, START, DATA, global_batch=12, world=devices, shares=[1, 3, 2], microbatch=3, resizable=False
    ) as program:
        plain = jnp.asarray(START)
        for report in program.run(steps=3):
            rows = rows_of(report.metrics["taken"])
            batch = {name: jnp.asarray(leaf[rows]) for name, leaf in DATA.items()}
            plain = plain - RATE * jax.grad(normalized_loss)(plain, batch, lambda x: x.mean(0))
        np.testing.assert_allclose(program.state, plain, rtol=0, atol=1e-12)


def test_random_numbers_belong_to_examples_and_not_to_workers(devices):
    def noisy(w, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,), jnp.float64))(ad.example_keys(batch))
        grads = comm.all_reduce(jax.grad(mean_loss)(w, {**batch, "x": batch["x"] + noise}))
        return w - RATE * grads, {}

    def run(world, **options):
        with ad.Program(noisy, START, DATA, global_batch=12, world=world, resizable=False, **options) as program:
            for _ in program.run(steps=3):
                pass
            return np.asarray(program.state)

    alone = run(comm.SoloWorld())
    np.testing.assert_allclose(run(devices, shares=[1, 3, 2], microbatch=3), alone, rtol=0, atol=1e-12)
    assert np.abs(alone - START).max() > 1e-3


def test_reductions_are_those_of_the_whole_batch(devices):
    def driver(w, batch):
        y, ids = batch["y"], batch["id"].astype(w.dtype)
        return w, {
            "mean": comm.all_reduce(y.mean()),
            "by tokens": comm.all_reduce((y * ids).sum() / ids.sum(), weight=ids.sum()),
            "sum": comm.all_reduce(y.sum(), op="sum"),
            "max": comm.all_reduce(y.max(), op="max"),
            "min": comm.all_reduce(y.min(), op="min"),
            "gathered": comm.all_gather(y.mean()),
            "of worker 1": comm.broadcast(y.mean(), root=1),
            "of workers": comm.all_gather(comm.local_mean(y.mean())),
            "taken": taken(batch),
        }

    with ad.Program(driver, START, DATA, global_batch=12, world=devices, shares=[1, 3, 2], resizable=False) as program:
        metrics = jax.tree.map(np.asarray, program.step().metrics)
    rows = rows_of(metrics.pop("taken"))
    y, ids = DATA["y"][rows], DATA["id"][rows]
    np.testing.assert_allclose(metrics["mean"], y.mean(), rtol=1e-12)
    np.testing.assert_allclose(metrics["by tokens"], (y * ids).sum() / ids.sum(), rtol=1e-12)
    np.testing.assert_allclose(metrics["sum"], y.sum(), rtol=1e-12)
    assert (metrics["max"], metrics["min"]) == (y.max(), y.min())
    assert metrics["gathered"].shape == (3,)
    np.testing.assert_allclose(metrics["gathered"] @ [2, 6, 4] / 12, y.mean(), rtol=1e-12)
    np.testing.assert_allclose(metrics["of worker 1"], metrics["gathered"][1], rtol=1e-12)
    np.testing.assert_allclose(metrics["of workers"], metrics["gathered"], rtol=1e-12)


def test_robust_means_leave_a_bad_worker_out(devices):
    def driver(w, batch):
        grads = jax.grad(mean_loss)(w, batch)
        sent = jnp.where(ad.worker_index() == 1, 1e6, 1.0) * grads
        return w, {
            "median": comm.all_reduce(sent, op="median"),
            "trimmed": comm.all_reduce(sent, op=comm.trimmed_mean(1)),
            "geometric": comm.all_reduce(sent, op=comm.geometric_median()),
            "rows": comm.all_gather(sent),
        }

    with ad.Program(driver, START, DATA, global_batch=12, world=devices, resizable=False) as program:
        metrics = jax.tree.map(np.asarray, program.step().metrics)
    rows = metrics["rows"]
    np.testing.assert_allclose(metrics["median"], np.median(rows, axis=0), rtol=1e-12)
    np.testing.assert_allclose(metrics["trimmed"], np.sort(rows, axis=0)[1], rtol=1e-12)
    good = rows[[0, 2]]
    assert np.linalg.norm(metrics["geometric"] - good.mean(0)) < 2 * np.linalg.norm(good[0] - good[1])


def bad_at(example: int) -> dict[str, np.ndarray]:
    y = DATA["y"].copy()
    y[example] = np.nan
    return {**DATA, "y": y}


@pytest.fixture(scope="module")
def bad_example() -> int:
    """An example of the second step."""
    _, steps = one_worker([12, 12, 12])
    return int(rows_of(steps[1])[5])


def test_nans_raise_and_the_state_is_that_of_the_step_before(devices, bad_example):
    options = {"global_batch": 12, "world": devices, "resizable": False}
    with ad.Program(descend, START, bad_at(bad_example), **options) as program:
        before = [program.step()]
        with pytest.raises(ad.NonFiniteError):
            program.step()
        check_descent(program.state, before)


def test_nans_are_skipped_with_their_step(devices, bad_example):
    options = {"global_batch": 12, "world": devices, "resizable": False}
    with ad.Program(descend, START, bad_at(bad_example), nonfinite="skip", **options) as program:
        reports = [program.step() for _ in range(4)]
        state = np.asarray(program.state)
    assert [report.skipped for report in reports] == [False, True, False, False]
    w, steps = START, one_worker([12] * 4)[1]
    for number in (0, 2, 3):
        w = w - RATE * gradient(w, rows_of(steps[number]))
    np.testing.assert_allclose(state, w, rtol=0, atol=1e-12)
    assert reports[-1].examples == 48


def test_nans_are_dropped_with_their_microbatch_or_allowed(devices, bad_example):
    def dropping(w, batch):
        grads = comm.all_reduce(jax.grad(mean_loss)(w, batch), nonfinite="drop")
        return w - RATE * grads, {"taken": taken(batch), "all": comm.all_reduce(mean_loss(w, batch))}

    options = {"global_batch": 12, "world": devices, "resizable": False, "nonfinite": "allow"}
    with ad.Program(dropping, START, bad_at(bad_example), microbatch=1, **options) as program:
        reports = [program.step() for _ in range(2)]
        state = np.asarray(program.state)
    w = START
    for report in reports:
        rows = rows_of(report.metrics["taken"])
        w = w - RATE * gradient(w, rows[rows != bad_example])
    np.testing.assert_allclose(state, w, rtol=0, atol=1e-12)
    assert [bool(np.isnan(report.metrics["all"])) for report in reports] == [False, True]


def test_evaluate_counts_every_example_once(devices):
    with ad.Program(descend, START, DATA, global_batch=12, world=devices, shares=[1, 3, 2], resizable=False) as program:
        reports = [program.step()]
        found = program.evaluate(lambda w, batch: {"loss": mean_loss(w, batch)}, DATA, batch=7)["loss"]
        np.testing.assert_allclose(found, mean_loss(np.asarray(program.state), DATA), rtol=1e-12)
        total = program.evaluate(lambda w, batch: (batch["y"] > 0).sum(), DATA, batch=7, op="sum")
    assert total == (DATA["y"] > 0).sum()
    check_epochs([np.asarray(report.metrics["taken"]) for report in reports])
    assert len(DATA["y"]) == EXAMPLES
