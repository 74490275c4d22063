"""Synchronization strategies, against their published equations in numpy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import collectives.strategies as sync
import controllers as ctrl
import monitors as mon

from .problem import DATA, EXAMPLES, RATE, START, gradient, mean_loss, plain_descent, taken

N = 3  # workers
PARTS = 4  # local steps in a round


def taken_by_worker(batch: Any) -> jax.Array:
    """The examples of each worker, in their order; shape=(workers, examples), as all have equally many."""
    return comm.all_gather(batch["id"])


def program_of(strategy, world, batch=12, **options) -> ad.Program:
    """A program whose metrics are the loss, and the examples of each worker."""

    def driver(state, batch):
        state, loss = strategy.step(state, jax.value_and_grad(mean_loss), batch)
        return state, {"loss": comm.all_reduce(loss), "ids": taken_by_worker(batch)}

    options = {"resizable": False, "per_worker_state": strategy.per_worker_state, **options}
    return ad.Program(driver, strategy.init(jnp.asarray(START)), DATA, global_batch=batch, world=world, **options)


def run(strategy, world, steps, **options):
    """The model after so many steps, and the workers' examples in each; shape=(steps, workers, examples)."""
    with program_of(strategy, world, **options) as program:
        reports = list(program.run(steps=steps))
        return np.asarray(strategy.model(program.state)), np.array([report.metrics["ids"] for report in reports])


def local_descent(w, ids, rate=RATE):
    """Descend over the minibatches of one worker's examples."""
    for part in np.split(ids, PARTS):
        w = w - rate * gradient(w, part)
    return w


def close(a, b, atol=1e-12):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def test_synchronous_is_one_worker_with_all_examples(devices):
    w, ids = run(sync.synchronous(optax.sgd(RATE)), devices, 3)
    for step in ids:
        assert len(set(step.ravel())) == 12
    close(w, plain_descent(np.bincount(step.ravel(), minlength=EXAMPLES) for step in ids))


def test_synchronous_with_a_robust_mean(devices):
    w, ids = run(sync.synchronous(optax.sgd(RATE), op="median"), devices, 3)
    expected = START
    for step in ids:
        expected = expected - RATE * np.median([gradient(expected, rows) for rows in step], axis=0)
    close(w, expected)


def test_pairs_average_two_replicas_in_each_step(devices):
    pairs = [[(0, 1)], [(1, 2)], [(0, 2)]]
    strategy = sync.pair_averaging(optax.sgd(RATE), pairs)
    with program_of(strategy, devices) as program:
        replicas = [START] * N
        for number in range(5):
            ids = np.asarray(program.step().metrics["ids"])
            ((a, b),) = pairs[number % 3]
            updates = [-RATE * gradient(x, rows) for x, rows in zip(replicas, ids, strict=True)]
            mean = (replicas[a] + replicas[b]) / 2
            replicas = [(mean if i in (a, b) else replicas[i]) + updates[i] for i in range(N)]
        close(strategy.model(program.state), replicas[0])
        close(sync.average(program, strategy), np.mean(replicas, axis=0))


def test_asynchronous_pairs_read_a_replica_without_waiting_and_meet_at_the_end_of_a_round(devices):
    """The result depends on speeds: it is checked that rounds end in the mean of replicas, and that the loss falls."""

    def local_step(w, part):
        return comm.asynchronous_mean(w) - RATE * jax.grad(mean_loss)(w, part), None

    def driver(w, batch):
        last, _ = jax.lax.scan(local_step, w, ad.minibatches(batch, size=2))
        return comm.all_reduce(last), {"apart": comm.all_gather(last)}

    with ad.Program(driver, START, DATA, global_batch=24, world=devices, resizable=False) as program:
        for _ in range(12):
            report = program.step()
            close(np.asarray(program.state), np.asarray(report.metrics["apart"]).mean(0))
        assert mean_loss(np.asarray(program.state), DATA) < 0.5 * mean_loss(START, DATA)


def diloco(rounds, outer_rate=0.7, momentum=0.9):
    """The model after these rounds of examples, in numpy: Nesterov's momentum on the change of each round."""
    w, velocity = START, np.zeros_like(START)
    for round_ in rounds:
        change = w - np.mean([local_descent(w, rows) for rows in round_], axis=0)
        velocity = momentum * velocity + change
        w = w - outer_rate * (change + momentum * velocity)
    return w


def test_diloco_takes_outer_steps_along_the_change_of_a_round(devices):
    strategy = sync.diloco(optax.sgd(RATE), optax.sgd(0.7, momentum=0.9, nesterov=True), steps=PARTS)
    w, rounds = run(strategy, devices, 4, batch=24)
    close(w, diloco(rounds))


@pytest.mark.parametrize(("wire", "bits", "left"), [("8bit", 8, 0.1), ("4bit", 4, 0.1), ("2bit", 2, 0.75)])
def test_diloco_in_few_bits_sends_later_what_rounding_takes_away(devices, wire, bits, left):
    """So after many rounds less of it is missing than with rounding alone: this part, at most, for these bits."""
    size, rounds = 4096, 16
    target = np.random.default_rng(0).normal(size=size)

    def run_with(**options):
        """The relative error of the sum of all rounds' changes, and the bytes of a round."""
        strategy = sync.diloco(optax.sgd(1.0), optax.sgd(1.0), steps=1, **options)

        def driver(state, batch):  # the change of each local step is -target
            state, _ = strategy.step(state, lambda w, batch: (batch["y"].mean(), jnp.asarray(target)), batch)
            return state, {}

        options = {"world": devices, "resizable": False, "per_worker_state": strategy.per_worker_state}
        with ad.Program(driver, strategy.init(jnp.zeros(size)), DATA, global_batch=12, **options) as program:
            reports = list(program.run(steps=rounds))
            w = np.asarray(strategy.model(program.state))
        return np.linalg.norm(w / rounds + target) / np.linalg.norm(target), reports[-1].message_bytes

    with_feedback, nbytes = run_with(wire=wire)
    rounded, _ = run_with(wire=wire, rounding="nearest")
    assert 0 < with_feedback < left * rounded
    assert nbytes < 8 * size * bits / 64 * 2.2  # each worker sends its part, and then the sum of a slice


def test_a_hook_switches_a_hybrid_from_model_averaging_to_synchronous(devices):
    averaging = sync.model_averaging(optax.sgd(RATE), alpha=0.3)
    strategy = sync.hybrid(averaging, sync.synchronous(optax.sgd(RATE)))

    def switch(control):
        if control.step == 3:
            control.set_hyperparameters(synchronous=True)

    def driver(state, batch):
        state, _ = strategy.step(state, jax.value_and_grad(mean_loss), batch)
        ctrl.hook(switch)
        apart = mon.gradient_norm(comm.all_reduce(strategy.replica(state)) - strategy.model(state))
        return state, {"ids": taken_by_worker(batch), "taken": taken(batch), "apart": apart}

    options = {"world": devices, "resizable": False, "per_worker_state": strategy.per_worker_state}
    with ad.Program(driver, strategy.init(jnp.asarray(START)), DATA, global_batch=12, **options) as program:
        models, reports = [], []
        for _ in range(6):
            reports.append(program.step())
            models.append(np.asarray(strategy.model(program.state)))
    w, ids = run(averaging, devices, 3)
    np.testing.assert_array_equal(ids, [report.metrics["ids"] for report in reports[:3]])
    close(models[2], w)
    close(models[-1], plain_descent([report.metrics["taken"] for report in reports[3:]], w=w))
    assert float(reports[-1].metrics["apart"]) < 1e-12


def test_a_narrow_wire_halves_the_bytes_and_rounds(devices):
    size = 1000
    target = np.random.default_rng(0).normal(size=size)

    def build(**options):
        def driver(w, batch):
            return w, {"mean": comm.all_reduce(target * (1 + batch["y"].mean()), **options)}

        return ad.Program(driver, jnp.zeros(()), DATA, global_batch=12, world=devices, resizable=False)

    with build() as plain, build(wire=jnp.bfloat16) as narrow:
        exact, rounded = plain.step(), narrow.step()
    assert rounded.message_bytes < 0.3 * exact.message_bytes  # of 8 bytes a number, 2
    error = np.abs(np.asarray(rounded.metrics["mean"]) - np.asarray(exact.metrics["mean"]))
    assert (error.max() > 0) & (error.max() < 0.01 * np.abs(exact.metrics["mean"]).max())
