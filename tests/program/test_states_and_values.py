"""States of any kind, keys that belong to examples, exact means over a data set, and whether a driver is invariant."""

from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import adaptive as ad
import collectives as comm

from .problems import (
    ADAM,
    CLASSES,
    FEATURES,
    HIDDEN,
    adam_driver,
    adam_state,
    build,
    difference,
    force_microbatches,
    losses,
    make_data,
    make_params,
    mean_loss,
    same_everywhere,
)

COVERS = ("adaptive/operators/values.py",)

# --- states -----------------------------------------------------------------------------------------------------------


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(nn.tanh(nn.Dense(HIDDEN)(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.outer = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)))


def with_train_state():
    net = LinenNet()
    params = net.init(jax.random.key(0), jnp.zeros((1, FEATURES)))
    state = TrainState.create(apply_fn=net.apply, params=params, tx=ADAM)

    def driver(state, batch):
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(state.apply_fn(p, batch["x"]), batch))(state.params)
        loss, grads = comm.all_reduce((loss, grads))
        return state.apply_gradients(grads=grads), {"loss": loss}

    def plain(state, batch):
        grads = jax.grad(lambda p: cross_entropy(state.apply_fn(p, batch["x"]), batch))(state.params)
        return state.apply_gradients(grads=grads)

    return state, driver, plain


def with_nnx():
    """Split when the program is built, merged in the driver."""
    model = NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, batch, reduce):
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch["x"]), batch))(model)
        loss, grads = reduce((loss, grads))
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    def driver(state, batch):
        return step(state, batch, comm.all_reduce)

    def plain(state, batch):
        return step(state, batch, lambda x: x)[0]

    return state, driver, plain


class Everything(NamedTuple):
    """Leaves of all kinds that a state may have."""

    params: dict
    key: jax.Array
    steps: int
    done: jax.Array
    half: jax.Array
    none: None
    untouched: np.ndarray


def with_leaves_of_all_kinds():
    state = Everything(
        make_params(),
        jax.random.key(7),
        0,
        jnp.array(False),
        jnp.ones(3, jnp.bfloat16),
        None,
        np.arange(4.0, dtype="f"),
    )

    def step(state, batch, reduce):
        loss, grads = reduce(jax.value_and_grad(mean_loss)(state.params, batch))
        key, sub = jax.random.split(state.key)
        noise = 1e-3 * jax.random.normal(sub, ())
        params = jax.tree.map(lambda p, g: p - 0.1 * g + noise, state.params, grads)
        half = (state.half * 1.5).astype(jnp.bfloat16)
        new = Everything(params, key, state.steps + 1, state.steps > 0, half, None, state.untouched)
        return new, {"loss": loss}

    return state, lambda s, b: step(s, b, comm.all_reduce), lambda s, b: step(s, b, lambda x: x)[0]


@pytest.mark.parametrize("kind", [with_train_state, with_nnx, with_leaves_of_all_kinds])
def test_states_of_many_kinds(world, kind):
    """Each trains as the plain loop does, keeps its structure, and comes back as what it was."""
    state, driver, plain = kind()
    data = make_data(48)
    with build(driver, state, data, 48, world=world) as program:
        kept = program.state
        for _ in range(4):
            program.step()
        ours = program.state
    expected, step = state, jax.jit(plain)
    for _ in range(4):
        expected = step(expected, data)
    assert jax.tree.structure(ours) == jax.tree.structure(state)
    assert [leaf.dtype for leaf in jax.tree.leaves(ours)] == [jnp.asarray(x).dtype for x in jax.tree.leaves(state)]
    plain_leaves = jax.tree.map(_as_numbers, (ours, expected, kept, state))
    assert difference(plain_leaves[0], plain_leaves[1]) < 1e-5
    assert difference(plain_leaves[2], plain_leaves[3]) == 0  # a copy, though its buffers were given away
    assert same_everywhere(world, plain_leaves[0])


def test_python_numbers_in_the_state_are_promoted_as_jit_does(world):
    """A learning rate of Python's leaves a model in half precision what it is; one that becomes an array does not."""

    def step(state, batch, reduce, decay):
        with jax.numpy_dtype_promotion("standard"):
            grad = reduce(jax.grad(lambda w: jnp.mean(batch["x"].astype(jnp.bfloat16) @ w))(state["w"]))
            return {"w": state["w"] - state["rate"] * grad, "rate": state["rate"] * decay, "steps": state["steps"] + 1}

    def driver(state, batch):
        return step(state, batch, comm.all_reduce, 0.5), {}

    state = {"w": jnp.ones((FEATURES,), jnp.bfloat16), "rate": 0.25, "steps": 0}
    data = {"x": np.ones((48, FEATURES), np.float32)}
    with build(driver, state, data, 48, world=world) as program:
        for _ in range(2):
            program.step()
        ours = program.state
        at_rate = program.evaluate(lambda s, b: (s["rate"] * b["x"].astype(jnp.bfloat16)).mean(), data)
        program.restore(program.checkpoint())
        program.step()
    expected = state
    for _ in range(2):
        expected = jax.jit(lambda s: step(s, data, lambda x: x, 0.5))(expected)
    assert difference(ours, expected) == 0
    kinds = [jax.tree.map(lambda a: (a.dtype, a.weak_type), tree) for tree in (ours, expected)]
    assert kinds[0] == kinds[1] == {"w": (jnp.bfloat16, False), "rate": (jnp.float32, True), "steps": (jnp.int32, True)}
    assert at_rate == 0.25 * 0.5**2
    with build(driver, ours, data, 48, world=world) as program:  # and what comes out can go in again
        program.step()

    def hardening(state, batch):
        return step(state, batch, comm.all_reduce, jnp.float32(0.5)), {}

    with pytest.raises(ad.DriverError, match=r"changes state\['w'\] from bfloat16\[6\] to float32\[6\]"):
        build(hardening, state, data, 48, world=world)


def _as_numbers(leaf):
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf, np.float64)


# --- keys -------------------------------------------------------------------------------------------------------------


def dropout_driver(params, batch):
    """Each example is dropped out by its own key; noise on the gradient by the step's."""
    keys = ad.example_keys()

    def loss_fn(params):
        keep = jax.vmap(lambda key, x: jax.random.bernoulli(key, 0.7, x.shape))(keys, batch["x"])
        return losses(params, {**batch, "x": jnp.where(keep, batch["x"] / 0.7, 0)}).mean()

    loss, grads = comm.all_reduce(jax.value_and_grad(loss_fn)(params))
    noise = 1e-3 * jax.random.normal(ad.step_key(), (), loss.dtype)
    new = jax.tree.map(lambda p, g: p - 0.1 * g + noise, params, grads)
    first = comm.all_reduce(jax.random.uniform(keys[0], (), jnp.float32), op="min")
    return new, {"loss": loss, "noise": noise, "first": first, "step": ad.step_number(), "batch": ad.global_batch()}


def test_keys_do_not_depend_on_the_split(world):
    data, reports = make_data(), {}

    def train(world, shares, microbatches):
        options = {"shares": shares, "seed": 11, "microbatch": 2 if microbatches else None, "resizable": microbatches}
        with build(dropout_driver, make_params(), data, 10, world=world, **options) as program:
            program.warm_up()
            if microbatches:
                force_microbatches(program, 5, largest=2)
            reports[microbatches] = [program.step() for _ in range(6)]
            return program.state

    ours = train(world, [1.0 + w for w in range(world.size)], True)
    with comm.SoloWorld() as alone:
        expected = train(alone, None, False)
    assert difference(ours, expected) < 1e-5
    noise = [float(r.metrics["noise"]) for r in reports[True]]
    assert noise == [float(r.metrics["noise"]) for r in reports[False]]
    assert len(set(noise)) == 6  # another key in each step
    assert [int(r.metrics["step"]) for r in reports[True]] == list(range(6))
    assert {int(r.metrics["batch"]) for r in reports[True]} == {10}


def test_every_example_of_a_step_has_a_key_of_its_own(world):
    def driver(state, batch):
        draws = jax.vmap(lambda key: jax.random.uniform(key))(ad.example_keys())
        sums = comm.all_reduce(
            {"n": jnp.ones_like(draws).sum() + 0 * draws[0], "x": draws.sum(), "xx": (draws**2).sum()}, op="sum"
        )
        return state + sums["x"], sums

    expected = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(_step_key(11, 0), i)))(np.arange(24))
    with build(driver, 0.0, make_data(), 24, world=world, seed=11, microbatch=3) as program:
        metrics = program.step().metrics
    assert metrics["n"] == 24
    assert metrics["x"] == pytest.approx(float(expected.sum()), rel=1e-5)
    assert metrics["xx"] == pytest.approx(float((expected**2).sum()), rel=1e-5)


def _step_key(seed, step):
    return jax.random.fold_in(jax.random.key(seed), step)


# --- evaluate ---------------------------------------------------------------------------------------------------------


class Torn:
    """A source of which the last worker's first example cannot be read."""

    def __init__(self, world):
        self.torn = 5 * (world.size - 1) or 7

    def __len__(self):
        return 50

    def __getitem__(self, index):
        if index == self.torn:
            raise OSError("torn page")
        return {"x": np.float32(index)}


def test_an_evaluation_that_fails_on_one_worker(world):
    source = Torn(world)
    # Several processes compare what they evaluate on, and all come upon it.
    mine = world.processes > 1 or source.torn // 5 % world.size in world.workers
    with build(adam_driver, adam_state(), make_data(), 16, world=world) as program:
        with pytest.raises(OSError if mine else ad.WorkerError, match="torn page" if mine else "failed in evaluate"):
            program.evaluate(lambda state, rows: rows["x"].mean(), source, batch=5)
        program.step()
