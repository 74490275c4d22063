"""Gradients are exact on any split, and other reductions are what they say."""

from __future__ import annotations

import jax
import numpy as np

import adaptive as ad
import collectives as comm

from .problem import (
    DATA,
    RATE,
    START,
    check_descent,
    check_epochs,
    descend,
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


def test_evaluate_counts_every_example_once(devices):
    with ad.Program(descend, START, DATA, global_batch=12, world=devices, shares=[1, 3, 2], resizable=False) as program:
        reports = [program.step()]
        found = program.evaluate(lambda w, batch: {"loss": mean_loss(w, batch)}, DATA, batch=7)["loss"]
        np.testing.assert_allclose(found, mean_loss(np.asarray(program.state), DATA), rtol=1e-12)
        total = program.evaluate(lambda w, batch: (batch["y"] > 0).sum(), DATA, batch=7, op="sum")
    assert total == (DATA["y"] > 0).sum()
    check_epochs([np.asarray(report.metrics["taken"]) for report in reports])
