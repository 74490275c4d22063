"""The driver of the design, Listing 1 of Mai et al. 2019 with balancing: over every world as it stands."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.control.status import status_length
from tests.relaxed import relaxed_tx

from .problems import CLASSES, HIDDEN, build, make_data, mean_loss, same_everywhere

COVERS = ("controllers/_control.py", "controllers/_hook.py")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(nn.tanh(nn.Dense(HIDDEN)(x)))


net = Net()


def loss_fn(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, batch["x"]), batch["label"]).mean()


def adapt_batch_size(control, noise):
    control.barrier()
    control.rescale(global_batch=noise.scale)
    control.barrier()


def driver(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    avg_grads = comm.all_reduce(grads)
    noise = mon.noise_scale(grads, avg_grads)
    seconds = comm.all_gather(mon.compute_seconds())
    ctrl.hook(adapt_batch_size, noise, every=20)
    ctrl.hook(ctrl.balance(), seconds, every=10)
    state = state.apply_gradients(grads=avg_grads)
    return state, {"loss": comm.all_reduce(loss), "noise": noise.scale}


def make_state() -> TrainState:
    params = net.init(jax.random.key(0), jnp.zeros((1, 6)))
    return TrainState.create(apply_fn=net.apply, params=params, tx=relaxed_tx(optax.adam(0.02)))


def test_a_step_is_one_message_of_the_gradient_and_a_status(world):
    state, n = make_state(), world.size
    gradient = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    weight, loss, noise, seconds, status = 1, 1, 3, n, status_length(n)
    with build(driver, state, make_data(), 16, world=world) as program:
        reports = list(program.run(steps=5))
        assert len(program._parts.plan.messages) == 1
        (layout,) = program._parts.engine.layouts
        assert len(layout.parts) == 1  # in one buffer
    assert {r.messages for r in reports} == {1}
    assert {r.message_bytes for r in reports} == {4 * (gradient + weight + loss + noise + seconds + status)}


def test_exchanges_are_counted_where_they_are_made(world, monkeypatch):
    calls, channel = [], world.channel

    class Counted:
        def __init__(self, *layout):
            self.channel = channel(*layout)

        def exchange(self, *message):
            calls.append(1)
            return self.channel.exchange(*message)

    monkeypatch.setattr(world, "channel", Counted)
    with build(driver, make_state(), make_data(), 16, world=world, resizable=True) as program:
        for step in range(1, 12):
            program.step()
            assert len(calls) == step


def test_it_trains_and_adapts(world):
    with build(driver, make_state(), make_data(320), 32, world=world, resizable=True) as program:
        first = program.step()
        reports = list(program.run(epochs=12))
        program.warm_up()  # by now at the latest what was asked for can be made
        reports += list(program.run(steps=2))
        last = reports[-1]
        assert program.epoch == last.epoch >= 12
        assert last.step == program.steps
        assert last.examples == sum(r.global_batch for r in [first, *reports])
        decided = [r for r in reports if r.decision and r.decision.global_batch]
        assert decided
        assert all(r.step % 20 == 0 for r in decided)
        assert len({r.global_batch for r in reports}) > 1
        assert float(last.metrics["loss"]) < 0.5 * float(first.metrics["loss"])
        assert same_everywhere(world, [program.state.params, program.batch_sizes, last.notes])
    assert all(sum(r.batch_sizes) == r.global_batch and len(r.batch_sizes) == world.size for r in reports)
    assert {r.messages for r in reports} == {1}
    assert {r.message_bytes for r in reports} == {first.message_bytes}


def test_explain_describes_listing_1(world):
    with build(driver, make_state(), make_data(), 12, world=world) as program:
        text = program.explain()
        plan = program._parts.plan
    n = world.size
    assert "driver 'driver'" in text
    assert (f"{n} workers, global batch 12 = {n} x {12 // n}" if n > 1 else "1 worker, global batch 12") in text
    assert text.count("message 1 ") == 1
    assert "message 2" not in text
    assert "hook     'adapt_batch_size' every 20 steps (test_listing_1.py:" in text
    assert "hook     'balance' every 10 steps (test_listing_1.py:" in text
    assert "noise_scale" in text
    assert "compute_seconds" in text
    assert plan.splittable
    assert [h.hook.name for h in plan.hooks] == ["adapt_batch_size", "balance"]


def test_outside_a_program_it_executes_eagerly(world):
    """Where there is one worker; a mean over several needs their numbers of examples, which only a program knows."""
    batch = jax.tree.map(lambda a: a[:8], make_data())
    if world.size > 1:
        with pytest.raises(ad.CollectiveError, match="the number of examples is known only in a program"):
            driver(make_state(), batch)
        return
    state, metrics = driver(make_state(), batch)
    expected = make_state().apply_gradients(grads=jax.grad(loss_fn)(make_state().params, batch))
    assert metrics["loss"] == pytest.approx(float(loss_fn(make_state().params, batch)))
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_several_reductions_share_the_message(world):
    """Whatever is ready at once travels at once; a reduced value that is reduced again costs nothing."""

    def wordy(params, batch):
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        avg = {k: comm.all_reduce(g) for k, g in grads.items()}
        again = comm.all_reduce(avg)
        most, total = comm.all_reduce(loss, op="max"), comm.all_reduce(loss, op="sum")
        extra = {"most": most, "total": total, "rows": comm.all_gather(loss), "root": comm.broadcast(loss)}
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, again), extra

    from .problems import make_params

    with build(wordy, make_params(), make_data(), 16, world=world, microbatch=None) as program:
        assert len(program._parts.plan.messages) == 1
        metrics = program.step().metrics
    rows = np.asarray(metrics["rows"])
    assert rows.shape == (world.size,)
    assert metrics["most"] == rows.max()
    assert metrics["root"] == rows[0]
    assert metrics["total"] == pytest.approx(rows.sum(), rel=1e-6)
