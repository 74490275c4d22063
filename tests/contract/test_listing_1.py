"""Listing 1 of KungFu's workshop paper as a program: monitoring, hooks, barriers, and requests in force at once."""

from __future__ import annotations

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from tests.relaxed import relaxed_tx

from .problem import DATA, RATE, START, check_descent, check_epochs, descend, mean_loss, taken


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, param_dtype=jnp.float64)(nn.tanh(nn.Dense(4, param_dtype=jnp.float64)(x)))[:, 0]


def make_state() -> TrainState:
    params = Net().init(jax.random.key(0), jnp.zeros((1, 3)))
    return TrainState.create(apply_fn=Net().apply, params=params, tx=relaxed_tx(optax.adam(0.02)))


def net_loss(params, batch):
    return ((Net().apply(params, batch["x"]) - batch["y"]) ** 2).mean()


@jax.jit
def plain_step(state, weights):
    """A step on all examples, each weighted by how often it was taken."""

    def loss(params):
        return (Net().apply(params, DATA["x"]) - DATA["y"]) ** 2 @ weights

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def adapt_batch_size(control, noise):
    control.barrier()
    control.rescale(global_batch=np.clip(noise.scale, 6, 24))
    control.barrier()


def train(state, batch):
    loss, grads = jax.value_and_grad(net_loss)(state.params, batch)
    avg_grads = comm.all_reduce(grads)
    noise = mon.noise_scale(grads, avg_grads)
    seconds = comm.all_gather(mon.compute_seconds())
    ctrl.hook(adapt_batch_size, noise, every=4)
    ctrl.hook(ctrl.balance(), seconds, every=10)
    return state.apply_gradients(grads=avg_grads), {"loss": comm.all_reduce(loss), "noise": noise, "id": taken(batch)}


def test_listing_1_trains_and_its_batch_follows_the_noise(devices):
    state = make_state()
    with ad.Program(train, state, DATA, global_batch=12, world=devices, deterministic=True) as program:
        reports = list(program.run(steps=16))
        trained = program.state
    for report, then in itertools.pairwise(reports):
        asked = report.decision and report.decision.global_batch
        assert bool(asked) == (report.step % 4 == 0)
        if asked:
            assert asked == round(np.clip(float(report.metrics["noise"].scale), 6, 24))
        assert then.global_batch == (asked or report.global_batch)
    assert len({report.global_batch for report in reports}) > 1
    check_epochs([np.asarray(report.metrics["id"]) for report in reports])
    plain = state
    for report in reports:
        plain = plain_step(plain, np.asarray(report.metrics["id"]) / report.global_batch)
    for ours, theirs in zip(jax.tree.leaves(trained.params), jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


def test_monitoring_adds_a_few_numbers_to_the_gradients_message(devices):
    def watched(w, batch, monitored=True):
        loss, grads = jax.value_and_grad(mean_loss)(w, batch)
        avg_grads = comm.all_reduce(grads)
        metrics = {"loss": comm.all_reduce(loss)}
        if monitored:
            metrics["noise"] = mon.noise_scale(grads, avg_grads).scale
            metrics["seconds"] = comm.all_gather(mon.compute_seconds())
        return w - RATE * avg_grads, metrics

    def bare(w, batch):
        return watched(w, batch, monitored=False)

    options = {"global_batch": 12, "world": devices, "resizable": False}
    with ad.Program(watched, START, DATA, **options) as one, ad.Program(bare, START, DATA, **options) as other:
        monitored, plain = one.step(), other.step()
    assert monitored.messages == plain.messages == 1
    assert 0 < monitored.message_bytes - plain.message_bytes <= 8 * (3 + 3)  # the noise's sums, and seconds by worker


def test_rescale_n_peers(devices):
    """The listing's own request: a number of workers, each with the same batch."""
    with comm.DeviceWorld(jax.local_devices()[:3], workers=1) as world:

        def adapt_workers(control, loss):
            n_peers = {2: 3, 5: 2}[control.step] if control.step in (2, 5) else control.workers
            control.barrier()
            control.rescale(workers=n_peers, global_batch=4 * n_peers)
            control.barrier()

        def driver(w, batch):
            w, metrics = descend(w, batch)
            ctrl.hook(adapt_workers, metrics["loss"])
            return w, {**metrics, "n": ad.capacity() * jnp.ones(())}

        with ad.Program(driver, START, DATA, global_batch=4, world=world, deterministic=True) as program:
            reports = list(program.run(steps=12))
            check_descent(program.state, reports)
    members = [report.members for report in reports]
    assert members[:2] == [(0,), (0,)]
    assert (0, 1, 2) in members
    assert members[-1] == (0, 1)
    assert all(report.global_batch == 8 for report in reports[-3:])


def test_hooks_run_in_the_drivers_order_when_due_and_see_replicated_values(devices):
    calls = []

    def first(control, loss, sizes):
        calls.append(("first", control.step, float(loss), sizes.tolist(), control.global_batch))
        if control.step == 2:
            control.rescale(global_batch=18)

    def second(control):
        calls.append(("second", control.step, control.global_batch))

    def driver(w, batch):
        w, metrics = descend(w, batch)
        ctrl.hook(first, metrics["loss"], comm.all_gather(ad.batch_size()), every=2)
        ctrl.hook(second)
        return w, metrics

    with ad.Program(driver, START, DATA, global_batch=12, world=devices, deterministic=True) as program:
        reports = list(program.run(steps=4))
    losses = [float(report.metrics["loss"]) for report in reports]
    assert calls == [
        ("second", 1, 12),
        ("first", 2, losses[1], [4, 4, 4], 12),
        ("second", 2, 18),
        ("second", 3, 18),
        ("first", 4, losses[3], [6, 6, 6], 18),
        ("second", 4, 18),
    ]
    assert [report.global_batch for report in reports] == [12, 12, 18, 18]


def test_outside_a_program_the_driver_runs_line_by_line_as_one_worker():
    with comm.SoloWorld():
        state, metrics = train(make_state(), {name: jnp.asarray(leaf) for name, leaf in DATA.items()})
    expected = make_state().apply_gradients(grads=jax.grad(net_loss)(make_state().params, DATA))
    np.testing.assert_allclose(metrics["loss"], net_loss(make_state().params, DATA), rtol=1e-12)
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)
