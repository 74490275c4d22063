"""`check` tells models whose step depends on the split from those whose does not, and names what differs."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import collectives as comm
import monitors as mon
from adaptive import operators
from adaptive._check import _random_split
from adaptive._local import LocalWorld

from .drivers import FEATURES, Recorder, make_data, mean_loss, planned, pointed_at

W = jnp.array([0.3, -0.2, 0.1])
DATA = make_data(32)


def check(driver, state, *, workers=2, global_batch=4, data=DATA, **options):
    with ad.Program(driver, state, data, global_batch=global_batch, world=LocalWorld(workers)) as program:
        return program.check(**options)


def train(loss_fn, tx=optax.sgd(0.1)):  # noqa: B008
    """A driver of `loss_fn(params, batch)`, and its state."""

    def driver(state, batch):
        params, opt = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt = tx.update(comm.all_reduce(grads), opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": comm.all_reduce(loss)}

    return driver, lambda params: (params, tx.init(params))


# --- models that are split-invariant ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
def test_a_mean_loss_is_invariant_under_any_number_of_workers(workers):
    driver, init = train(mean_loss)
    found = check(driver, init(W), workers=workers)
    assert found
    assert found.differences == found.reductions == {}
    assert len(found.splits) == 3
    assert all(len(split) == workers and sum(map(sum, split)) == 4 for split in found.splits)
    assert str(found).startswith("split-invariant: 3 random splits of 4 examples")


def dropout(keys):
    def loss(w, batch):
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (FEATURES,)))(keys(batch))
        return mean_loss(w, {**batch, "x": batch["x"] * keep})

    driver, init = train(loss)
    return driver, init(W)


def test_dropout_with_a_key_for_each_example_is_invariant():
    assert check(*dropout(lambda batch: ad.example_keys(batch)))


def test_dropout_with_keys_by_place_in_the_call_is_not():
    driver, state = dropout(lambda batch: jax.random.split(ad.step_key(), batch["y"].shape[0]))
    found = check(driver, state)
    assert not found
    assert list(found.differences) == ["state[0]"]


def test_operators_that_look_at_the_split_do_not_count_unless_the_state_follows_them():
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state, batch)
        average = comm.all_reduce(grads)
        noise = mon.noise_scale(grads, average)
        operators.hook("watch", Recorder(), (noise, comm.all_gather(mon.compute_seconds())))
        apart = comm.all_reduce(mon.ema(comm.all_reduce(jnp.sum(grads**2))), op="max")
        return state - 0.1 * average, {"noise": noise.scale, "apart": apart}

    assert check(driver, W)


def test_a_state_that_follows_such_an_operator_depends_on_the_split():
    def driver(state, batch):
        grads = jax.grad(mean_loss)(state["w"], batch)
        square = comm.all_reduce(jnp.sum(grads**2))  # the mean of squares is not the square of the mean
        return {"w": state["w"] - 0.1 * comm.all_reduce(grads), "square": state["square"] + square}, {}

    found = check(driver, {"w": W, "square": 0.0})
    assert list(found.differences) == ["state['square']"]
    (reduction,) = found.reductions
    assert "square = comm.all_reduce" in pointed_at(RuntimeError(reduction))[0]


def test_keys_and_integers_in_the_state_are_no_differences():
    def driver(state, batch):
        key, _ = jax.random.split(state["key"])
        step = state["step"] + 1
        return {"key": key, "step": step, "w": state["w"] - comm.all_reduce(jax.grad(mean_loss)(state["w"], batch))}, {}

    assert check(driver, {"key": jax.random.key(0), "step": 0, "w": W})


# --- rounding is no difference ----------------------------------------------------------------------------------------


def test_adam_with_tiny_gradients_gives_no_false_alarm():
    """Adam's first step is as large for a gradient of 1e-9 as for one of 1."""
    driver, init = train(lambda w, b: 1e-9 * mean_loss(w, b), optax.adam(0.1, eps=1e-30))
    assert check(driver, init(W))


def test_adam_with_gradients_that_are_zero_but_for_rounding_gives_no_false_alarm():
    """What softmax does not see, such as a shift of all logits, has a gradient of rounding errors."""

    def loss(params, batch):
        logits = batch["x"] * params["w"][None] + params["shift"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, (batch["y"] > 0).astype(jnp.int32)).mean()

    driver, init = train(loss, optax.adam(0.1))
    found = check(driver, init({"w": W, "shift": 0.0}))
    assert found, found


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_gives_no_false_alarm(dtype):
    def loss(w, batch):
        half = jax.tree.map(lambda a: a.astype(dtype), (w, batch))
        return mean_loss(*half).astype(jnp.float32)

    driver, init = train(loss)
    found = check(driver, init(W))
    assert found, found


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_summed_loss_is_found_in_any_precision(dtype):
    driver, init = train(lambda w, b: jnp.sum((b["x"].astype(dtype) @ w.astype(dtype) - b["y"]) ** 2))
    found = check(driver, init(W))
    assert not found
    assert max(found.differences.values()) > 0.1


def test_double_precision_is_compared_to_its_own():
    with jax.enable_x64(True):
        data = {k: v.astype(np.float64) for k, v in DATA.items()}
        state = jnp.asarray(np.asarray(W, np.float64))

        def driver(state, batch):
            grads = jax.grad(mean_loss)(state, batch)
            odd = 1 + 1e-6 * (batch["y"].shape[0] % 2)
            return state - 0.1 * comm.all_reduce(odd * grads), {}

        def plain(state, batch):
            return state - 0.1 * comm.all_reduce(jax.grad(mean_loss)(state, batch)), {}

        assert check(plain, state, data=data)
        assert not check(driver, state, data=data)
        assert check(driver, state, data=data, tolerance=1e-3)


# --- models that are not ----------------------------------------------------------------------------------------------


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dense(1)(nn.tanh(x))[:, 0]


def test_batch_norm_is_found_in_parameters_and_statistics():
    variables = Normed().init(jax.random.key(0), jnp.zeros((2, FEATURES)))

    def driver(state, batch):
        def loss_fn(params):
            out, new = Normed().apply({**state, "params": params}, batch["x"], mutable=["batch_stats"])
            return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

        grads, stats = jax.grad(loss_fn, has_aux=True)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], comm.all_reduce(grads))
        return {"params": params, "batch_stats": comm.all_reduce(stats)}, {}

    found = check(driver, variables)
    assert not found
    assert "state['params']['Dense_0']['kernel']" in found.differences
    assert "state['batch_stats']['BatchNorm_0']['var']" in found.differences
    assert "state['batch_stats']['BatchNorm_0']['mean']" not in found.differences  # a mean of means is the mean
    text = str(found)
    assert "not split-invariant" in text
    assert "batch normalisation" in text
    assert all(name in text for name in (*found.differences, *found.reductions))


def contrastive(w, batch):
    """Each example is told from the others of its call."""
    scores = (batch["x"] * w[None]) @ batch["x"].T
    return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(len(scores)), jnp.arange(len(scores))])


@pytest.mark.parametrize(
    ("loss", "workers"),
    [
        (contrastive, 1),
        (contrastive, 3),
        (lambda w, b: jnp.sum((b["x"] @ w - b["y"]) ** 2), 1),
        (lambda w, b: jnp.sqrt(mean_loss(w, b)), 2),
    ],
)
def test_losses_that_are_no_means_over_examples_are_found(loss, workers):
    driver, init = train(loss)
    found = check(driver, init(W), workers=workers)
    assert not found
    assert list(found.differences) == ["state[0]"]
    assert all("all_reduce" in line for line in pointed_at(RuntimeError(str(found))))


# --- what is compared -------------------------------------------------------------------------------------------------


def test_a_batch_may_be_given():
    driver, init = train(lambda w, b: jnp.sum((b["x"] @ w - b["y"]) ** 2))
    nothing = {"x": np.zeros((5, FEATURES), np.float32), "y": np.zeros(5, np.float32)}
    found = check(driver, init(W), batch=nothing)
    assert found  # a sum of zeros is a mean of zeros
    assert all(sum(map(sum, split)) == 5 for split in found.splits)
    with pytest.raises(ad.DataError, match="batch is built as"):
        check(driver, init(W), batch={"x": nothing["x"]})


@pytest.mark.parametrize(("workers", "global_batch"), [(1, 1), (2, 2)])
def test_nothing_is_compared_where_nothing_can_be_split(workers, global_batch):
    driver, init = train(mean_loss)
    found = check(driver, init(W), workers=workers, global_batch=global_batch)
    assert found
    assert ("cannot be split" in str(found)) == (workers == 1)


def test_a_driver_that_cannot_be_split_is_compared_over_workers_alone():
    def driver(state, batch):
        rows = comm.all_gather(batch["y"].mean())
        return state - 0.1 * comm.all_reduce(jax.grad(mean_loss)(state, batch)), {"rows": rows}

    found = check(driver, W, workers=3)
    assert found
    assert all(len(pieces) == 1 for split in found.splits for pieces in split)
    assert "nothing to compare on one worker: all_gather" in str(check(driver, W, workers=1))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_split_differs_from_the_whole(workers):
    plan = planned(lambda s, b: (s, {"y": comm.all_reduce(b["y"].mean())}), 0.0)
    for seed in range(40):
        split = _random_split(np.random.default_rng(seed), 11, workers, plan)
        assert len(split) == workers
        assert sum(map(len, split)) >= 2
        assert sum(map(sum, split)) == 11
        assert all(piece > 0 for pieces in split for piece in pieces)


def test_checking_changes_nothing():
    def driver(state, batch):
        smooth = mon.ema(comm.all_reduce(batch["y"].mean()))
        operators.hook("watch", watched, (smooth,))
        return state - 0.1 * comm.all_reduce(jax.grad(mean_loss)(state, batch)), {"smooth": smooth}

    runs = []
    for checked in (False, True):
        watched = Recorder()
        with ad.Program(driver, W, DATA, global_batch=4, world=LocalWorld(2), deterministic=True) as program:
            reports = [program.step()]
            if checked:
                assert program.check()
                assert len(watched.seen) == 1
            reports += [program.step() for _ in range(2)]
            runs.append(([float(r.metrics["smooth"]) for r in reports], np.asarray(program.state).tolist()))
    assert runs[0] == runs[1]
