"""What users bring, as they write it: refused with what to write instead, which then is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld
from tests.relaxed import relaxed, relaxed_tx

EXAMPLES, FEATURES, CLASSES = 24, 4, 3
TX = relaxed_tx(optax.sgd(0.1, momentum=0.9))


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def make_data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, EXAMPLES).astype(np.int32)
    x = rng.normal(size=(EXAMPLES, FEATURES)) + 2 * rng.normal(size=(CLASSES, FEATURES))[y]
    return {"x": x.astype(np.float32), "y": y}


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def alike(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max() / (np.abs(y).max() or 1)) for x, y in pairs)


# --- linen ------------------------------------------------------------------------------------------------------------


class Linen(nn.Module):
    axis: str | None = None

    @nn.compact
    def __call__(self, x, train=True):
        for _ in range(2):
            x = nn.Dense(6)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis)(x))
        return nn.Dense(CLASSES)(x)


def linen_step(net, reduce):
    @relaxed
    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            logits, new = net.apply(variables, batch["x"], mutable=["batch_stats"])
            return cross_entropy(logits, batch), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = TX.update(reduce(grads), state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "batch_stats": stats, "opt": opt}
        return new, {"loss": reduce(loss)}

    return step


def linen_state():
    variables = Linen().init(jax.random.key(0), jnp.zeros((1, FEATURES)), train=False)
    return {**variables, "opt": TX.init(variables["params"])}


def test_linen_normalizes_by_the_whole_batch():
    """Workers with uneven batches, in several calls, and one with none take the step of one worker on all examples."""
    driver, uneven = linen_step(Linen("workers"), comm.all_reduce), {"shares": [5, 0, 1], "microbatch": 8}
    options = {"world": LocalWorld(3), "resizable": False, **uneven}
    with ad.Program(driver, linen_state(), make_data(), global_batch=EXAMPLES, **options) as program:
        assert program.batch_sizes == (20, 0, 4)
        losses = [float(report.metrics["loss"]) for report in program.run(steps=2)]
        state = program.state
    plain, expected = jax.jit(linen_step(Linen(), lambda x: x)), linen_state()
    for loss in losses:  # each step takes all examples
        expected, metrics = plain(expected, make_data())
        assert loss == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert alike(state["batch_stats"], expected["batch_stats"]) < 1e-6
    # A bias in front of a normalization has no gradient but rounding.
    kernels = [{k: v["kernel"] for k, v in s["params"].items() if "kernel" in v} for s in (state, expected)]
    assert alike(*kernels) < 2e-6


def test_the_error_about_linen_without_axis_name_says_what_to_write():
    with pytest.raises(ad.ReplicationError) as caught:
        ad.Program(linen_step(Linen(), comm.all_reduce), linen_state(), make_data(), global_batch=EXAMPLES)
    text = str(caught.value)
    assert "['batch_stats']['BatchNorm_0']['mean']" in text
    assert 'BatchNorm(..., axis_name="workers")' in text
    assert "docs/models.md" in text
    assert "Reduce the gradients first" not in text


# --- nnx --------------------------------------------------------------------------------------------------------------


class NNX(nnx.Module):
    def __init__(self, axis, rngs):
        self.first = nnx.Linear(FEATURES, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.9, axis_name=axis, rngs=rngs)
        self.last = nnx.Linear(6, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def nnx_state(axis):
    model = NNX(axis, nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def nnx_step(reduce):
    @relaxed
    def step(state, batch):
        model, optimizer = state
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch["x"]), batch))(model)
        optimizer.update(model, reduce(grads))
        return (model, optimizer), {"loss": reduce(loss)}

    return step


def test_nnx_objects_can_be_state():
    """A driver changes nnx objects in place; the state has their types, and the given objects are unchanged."""
    given = nnx_state("workers")
    before = jax.tree.map(jnp.copy, nnx.state(given[0]))
    with ad.Program(nnx_step(comm.all_reduce), given, make_data(), global_batch=EXAMPLES, resizable=False) as program:
        metrics = program.step().metrics
        model, _ = program.state
    assert isinstance(model, NNX)
    assert alike(nnx.state(given[0]), before) == 0
    expected, theirs = nnx_step(lambda x: x)(nnx_state(None), make_data())
    assert float(metrics["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-6)
    assert alike(nnx.state(model, nnx.BatchStat), nnx.state(expected[0], nnx.BatchStat)) < 1e-6
    assert alike(model.last.kernel.get_value(), expected[0].last.kernel.get_value()) < 2e-6


def test_the_error_about_nnx_without_axis_name_says_what_to_write():
    with pytest.raises(ad.ReplicationError, match=r'(?s)norm.mean.*axis_name="workers"') as caught:
        ad.Program(nnx_step(comm.all_reduce), nnx_state(None), make_data(), global_batch=EXAMPLES)
    assert "Reduce the gradients first" not in str(caught.value)


# --- equinox ----------------------------------------------------------------------------------------------------------


class Equinox(eqx.Module):
    layers: list
    activation: Callable

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def make_equinox() -> Equinox:
    return Equinox([eqx.nn.Linear(FEATURES, CLASSES, key=jax.random.key(0))], jax.nn.tanh)


def test_the_error_about_an_equinox_model_names_its_leaf_and_partition():
    with pytest.raises(ad.DriverError) as caught:
        ad.Program(lambda s, b: (s, {}), {"model": make_equinox()}, make_data(), global_batch=EXAMPLES)
    text = str(caught.value)
    assert "the state holds tanh, which is not an array of numbers, at state['model'].activation: it is a func" in text
    assert "eqx.partition(model, eqx.is_array)" in text
    assert "eqx.combine(params, static)" in text


# --- loss scaling -----------------------------------------------------------------------------------------------------


class Half(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES, dtype=jnp.float16)(x).astype(jnp.float32)


def half_loss(params, batch):
    return cross_entropy(Half().apply(params, batch["x"]), batch)


def of_flax(axis):
    """As in docs/models.md; without the axis as it is written for one worker, gradients reduced after it."""

    @relaxed
    def driver(state, batch):
        params, opt, scale = state
        scale, finite, loss, grads = scale.value_and_grad(half_loss, axis_name=axis)(params, batch)
        updates, new_opt = TX.update(grads if axis else comm.all_reduce(grads), opt, params)
        new = optax.apply_updates(params, updates), new_opt
        params, opt = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, opt))
        return (params, opt, scale), {"loss": comm.all_reduce(loss), "scale": scale.scale}

    return driver, DynamicScale(scale=2.0**20)


def of_jmp():
    @relaxed
    def driver(state, batch):
        params, opt, scale = state
        grads = jax.grad(lambda p: scale.scale(half_loss(p, batch)))(params)
        grads = scale.unscale(comm.all_reduce(grads))
        finite = jmp.all_finite(grads)
        updates, new_opt = TX.update(grads, opt, params)
        params, opt = jmp.select_tree(finite, (optax.apply_updates(params, updates), new_opt), (params, opt))
        return (params, opt, scale.adjust(finite)), {"loss": jnp.ones(()), "scale": scale.adjust(finite).loss_scale}

    return driver, jmp.DynamicLossScale(jnp.float32(2.0**20))


@pytest.mark.parametrize("made", [lambda: of_flax("workers"), of_jmp], ids=["flax", "jmp"])
def test_all_workers_skip_the_same_steps(made):
    """One example is so large that its worker's gradients overflow, and no other's do."""
    driver, scale = made()
    params = Half().init(jax.random.key(0), jnp.zeros((1, FEATURES)))
    data = make_data()
    data["x"][7] *= 200
    options = {"resizable": False, "nonfinite": "allow", "world": LocalWorld(3)}
    with ad.Program(driver, (params, TX.init(params), scale), data, global_batch=EXAMPLES, **options) as program:
        reports = list(program.run(steps=14))
        after = program.state[0]
    scales = [float(report.metrics["scale"]) for report in reports]
    assert scales[0] == 2.0**19
    assert 1 < scales[-1] == scales[-2] < 2.0**16  # it has fallen until no worker's overflow
    assert not any(report.skipped for report in reports)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert alike(after, params) > 0


def test_a_loss_scale_without_axis_name_is_refused_with_what_to_write():
    driver, scale = of_flax(None)
    params = Half().init(jax.random.key(0), jnp.zeros((1, FEATURES)))
    with pytest.raises(ad.ReplicationError) as caught:
        ad.Program(driver, (params, TX.init(params), scale), make_data(), global_batch=EXAMPLES, nonfinite="allow")
    text = str(caught.value)
    assert 'dynamic_scale.value_and_grad(loss_fn, axis_name="workers")' in text
    assert "docs/models.md" in text
    assert "Reduce the gradients first" not in text
