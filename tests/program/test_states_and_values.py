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
from tests.relaxed import relaxed_tx

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
    plain_adam,
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


def test_a_number_that_a_step_makes_an_array_of_is_one_from_the_start(world):
    def driver(state, batch):
        return state + comm.all_reduce(batch["x"].mean()), {}

    with build(driver, 1.5, {"x": np.ones(12, np.float32)}, 12, world=world) as program:
        program.step()
        assert (float(program.state), program.state.dtype, program.state.weak_type) == (2.5, jnp.float32, False)


# The driver of docs/sharp_bits.md, "Line searches".
LBFGS = relaxed_tx(optax.lbfgs(learning_rate=1.0, linesearch=None))
SIZES = 0.5 ** np.arange(8, dtype=np.float32)


def line_search_step(state, batch, reduce):
    params, opt = state
    loss, grads = reduce(jax.value_and_grad(mean_loss)(params, batch))
    updates, opt = LBFGS.update(grads, opt, params)

    def moved(size):
        return jax.tree.map(lambda p, u: p + size * u, params, updates)

    losses = reduce(jax.vmap(lambda size: mean_loss(moved(size), batch))(jnp.asarray(SIZES)))
    good = losses <= loss + 1e-4 * SIZES * optax.tree.vdot(grads, updates)
    size = jnp.where(good.any(), jnp.asarray(SIZES)[good.argmax()], SIZES[-1])
    return (moved(size), opt), {"loss": loss, "size": size}


def test_a_line_search_over_sizes_side_by_side(workers):
    """Two messages per step in any case; and the results of one worker without the library."""
    params, data = make_params(), make_data(48)
    state = params, LBFGS.init(params)
    with build(lambda s, b: line_search_step(s, b, comm.all_reduce), state, data, 48, world=workers) as program:
        reports = [program.step() for _ in range(12)]
    plain, expected = jax.jit(lambda s: line_search_step(s, data, lambda x: x)), []
    for _ in range(12):
        state, metrics = plain(state)
        expected.append(float(metrics["loss"]))
    assert {r.messages for r in reports} == {2}
    np.testing.assert_allclose([float(r.metrics["loss"]) for r in reports], expected, rtol=1e-2)
    assert expected[-1] < expected[0] / 2
    assert len({float(r.metrics["size"]) for r in reports}) > 1  # it was searched


def _as_numbers(leaf):
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf, np.float64)


def test_the_users_own_arrays_are_left_alone(world):
    state = adam_state()
    before = jax.tree.map(np.array, state)
    with build(adam_driver, state, make_data(), 16, world=world) as program:
        list(program.run(steps=3))
    assert difference(state, before) == 0  # and not given away to XLA


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


def test_operators_that_a_driver_may_use(world):
    """Sizes and numbers reach the graph as values, so that a change of them compiles nothing."""

    def driver(state, batch):
        mine = {"size": ad.batch_size(), "worker": ad.worker_index()}
        rows = comm.all_gather(mine)
        return state + comm.all_reduce(batch["x"].mean()), {"rows": rows, "n": jnp.asarray(ad.num_workers())}

    with build(driver, 0.0, make_data(), 24, world=world, microbatch=4, resizable=True) as program:
        program.warm_up()
        for total in (24, 30):
            report = program.step()
            assert report.metrics["rows"]["size"].tolist() == list(report.batch_sizes)
            assert report.metrics["rows"]["worker"].tolist() == list(range(world.size))
            assert report.metrics["n"] == world.size
            assert report.global_batch == total
            program.rescale(global_batch=30, shares=range(1, world.size + 1))


# --- evaluate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("examples", "batch"), [(103, 10), (64, 16), (3, 256), (5, 1)])
def test_means_over_a_data_set_are_exact(world, examples, batch):
    """Of integers, so that a single example too many or too few would show."""
    values = np.random.default_rng(0).integers(0, 1000, examples).astype(np.float32)

    def fn(state, rows):
        return {"mean": rows["x"].mean(), "vector": jnp.stack([rows["x"].mean(), (rows["x"] ** 2).mean()])}

    with build(adam_driver, adam_state(), make_data(), 8, world=world) as program:
        means = program.evaluate(fn, {"x": values}, batch=batch)
    wide = values.astype(np.float64)
    assert means["mean"] == pytest.approx(wide.mean(), rel=1e-7)
    np.testing.assert_allclose(means["vector"], [wide.mean(), (wide**2).mean()], rtol=1e-7)
    assert same_everywhere(world, means)


@pytest.mark.parametrize("precision", ["float64"], indirect=True)
def test_evaluation_is_of_the_state_of_the_last_step(world, precision):
    train, test = make_data(), make_data(77, seed=5)
    with build(adam_driver, adam_state(), train, 32, world=world) as program:
        batches = [r.global_batch for r in program.run(steps=5)]
        loss = program.evaluate(lambda state, rows: mean_loss(state["params"], rows), test, batch=10)
        accuracy = program.evaluate(lambda state, rows: jnp.ones(()) * (rows["label"] >= 0).mean(dtype=float), test)
        program.step()
    plain = plain_adam(train, batches, 3)
    assert loss == pytest.approx(float(mean_loss(plain, test)), rel=1e-12)
    assert accuracy == 1


def test_an_evaluation_that_is_no_mean_is_refused(world):
    with build(adam_driver, adam_state(), make_data(), 16, world=world) as program:
        with pytest.raises(ad.DriverError, match=r"shape \(20,\) for a batch of 20 examples and \(10,\)"):
            program.evaluate(lambda state, rows: losses(state["params"], rows), make_data(50), batch=20)
        with pytest.raises(ad.BatchSizeError, match="batch must be positive, a whole number of examples; got 0"):
            program.evaluate(lambda state, rows: 0.0, make_data(50), batch=0)
        with pytest.raises(ad.DataError, match="empty"):
            program.evaluate(lambda state, rows: 0.0, {"x": np.zeros((0, 2))})
        program.step()


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


# --- check ------------------------------------------------------------------------------------------------------------


class BatchNormNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(nn.BatchNorm(use_running_average=False)(nn.Dense(HIDDEN)(x)))


def sgd(loss_fn):
    def driver(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        return {
            "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], comm.all_reduce(grads)),
            "steps": state["steps"] + 1,
        }, {"loss": comm.all_reduce(loss)}

    return driver


def coupled(params, batch):
    """A contrastive loss: each example's depends on the others of its call."""
    z = batch["x"] @ params["inner"]["w"]
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


def normalized(params, batch):
    net = BatchNormNet()
    logits, _ = net.apply({"params": params}, batch["x"], mutable=["batch_stats"])
    return cross_entropy(logits, batch)


@pytest.mark.parametrize(
    ("loss_fn", "differs"),
    [
        (mean_loss, []),
        (lambda params, batch: losses(params, batch).sum(), ["inner", "outer"]),
        (coupled, ["['inner']['w']"]),
        (normalized, ["BatchNorm_0", "Dense_0", "Dense_1"]),
    ],
    ids=["mean", "sum", "coupled", "batch norm"],
)
def test_check_finds_drivers_that_depend_on_the_split(workers, loss_fn, differs):
    """A lone worker's are in tests/adaptive/check/test_invariance.py."""
    params = make_params()
    if loss_fn is normalized:
        params = BatchNormNet().init(jax.random.key(0), jnp.zeros((2, FEATURES)))["params"]
    with build(sgd(loss_fn), {"params": params, "steps": 0}, make_data(), 32, world=workers) as program:
        before = program.state
        found = program.check()
        assert difference(program.state, before) == 0  # it changes nothing
        assert program.steps == 0
        program.step()
    assert bool(found) == (not differs), found
    text = str(found)
    if differs:
        assert text.startswith("not split-invariant")
        assert all(any(name in leaf for leaf in found.differences) for name in differs), text
        assert not any("steps" in leaf for leaf in found.differences)
        assert "test_states_and_values.py:" in text
    else:
        assert text.startswith("split-invariant: ")
    assert same_everywhere(workers, sorted(found.differences))


def test_check_takes_a_batch_of_the_users_own(workers):
    with build(adam_driver, adam_state(), make_data(), 32, world=workers) as program:
        assert program.check(jax.tree.map(lambda a: a[:20], make_data(seed=9)))
        with pytest.raises(ad.DataError, match="check: the structure of batch is"):
            program.check({"x": make_data()["x"]})
