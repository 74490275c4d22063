"""Squared norms of single examples' gradients, against `jax.vmap(jax.grad)`."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import adaptive as ad
import monitors as mon

KEY = jax.random.key(0)


def images(n=6, size=8):
    rng = np.random.default_rng(1)
    return {
        "x": rng.standard_normal((n, size, size, 3)).astype(np.float32),
        "y": rng.integers(0, 5, n).astype(np.int32),
    }


def rows(n=6, width=7):
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((n, width)).astype(np.float32), "y": rng.integers(0, 5, n).astype(np.int32)}


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def by_vmap(loss_fn, params, batch):
    """The truth: a gradient for each example alone."""

    def one(row):
        grads = jax.grad(loss_fn)(params, jax.tree.map(lambda x: x[None], row))
        return jax.tree.map(lambda g: jnp.sum(jnp.square(g.astype(jnp.float32))), grads)

    return jax.vmap(one)(jax.tree.map(jnp.asarray, batch))


def verify(loss_fn, params, batch, rtol=1e-5):
    loss, grads, norms = jax.jit(lambda p, b: mon.example_norms(loss_fn)(p, b))(params, batch)
    # Compiled as a whole: each operation by itself is compiled, too, and there are hundreds.
    expected, expected_grads = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    truth = jax.jit(lambda p, b: by_vmap(loss_fn, p, b))(params, batch)
    assert jax.tree.structure(norms) == jax.tree.structure(params) == jax.tree.structure(grads)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-6), grads, expected_grads)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(norms), jax.tree.leaves(truth), strict=True):
        smallest = 1e-9 * float(np.max(want)) + 1e-12
        np.testing.assert_allclose(got, want, rtol=rtol, atol=smallest, err_msg=jax.tree_util.keystr(path))


# --- models -----------------------------------------------------------------------------------------------------------


def plain_mlp() -> tuple[Any, Any]:
    params = {
        "w": [jax.random.normal(KEY, (7, 8)), jax.random.normal(KEY, (8, 5))],
        "b": [jnp.ones(8), jnp.zeros(5)],
        "temperature": jnp.float32(1.3),
        "unused": jnp.ones(3),
    }

    def loss(p, batch):
        hidden = jax.nn.gelu(batch["x"] @ p["w"][0] + p["b"][0][None])
        return cross_entropy(p["temperature"] * (hidden @ p["w"][1] + p["b"][1][None]), batch["y"])

    return loss, params


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.dense = nnx.Linear(4 * 64, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.dense(x.reshape(len(x), -1))


def nnx_net():
    graph, params = nnx.split(NNXNet(nnx.Rngs(0)))
    return lambda p, batch: cross_entropy(nnx.merge(graph, p)(batch["x"]), batch["y"]), params


class EqxNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self):
        self.first, self.norm = eqx.nn.Linear(7, 8, key=KEY), eqx.nn.LayerNorm(8)
        self.mlp = eqx.nn.MLP(8, 5, width_size=6, depth=2, key=KEY)

    def __call__(self, x):
        return self.mlp(self.norm(jax.nn.silu(self.first(x))))


def eqx_net():
    params, static = eqx.partition(EqxNet(), eqx.is_array)

    def loss(params, batch):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["x"]), batch["y"])

    return loss, params


MODELS = {
    "plain": (plain_mlp, rows),
    "nnx": (nnx_net, images),
    "equinox": (eqx_net, rows),
}


@pytest.mark.parametrize("model", MODELS)
def test_norms_are_those_of_gradients_of_each_example_alone(model):
    (make, data) = MODELS[model]
    verify(*make(), data())


def test_aux_may_mix_examples_and_others_are_no_examples():
    def loss(w, batch, shift):
        guess = batch["x"] @ w - shift
        return jnp.mean(guess**2), {"spread": jnp.std(guess), "median": jnp.median(guess)}

    batch = {"x": rows()["x"]}
    (value, aux), grads, norms = mon.example_norms(loss, has_aux=True)(jnp.ones(7), batch, 0.5)
    (expected, expected_aux), expected_grads = jax.value_and_grad(loss, has_aux=True)(jnp.ones(7), batch, 0.5)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(np.testing.assert_allclose, aux, expected_aux)
    np.testing.assert_allclose(grads, expected_grads, rtol=1e-5)
    truth = by_vmap(lambda w, b: loss(w, b, 0.5)[0], jnp.ones(7), batch)
    np.testing.assert_allclose(norms, truth, rtol=1e-5)


def recurrent(w, batch):
    def cell(h, x):
        return jnp.tanh(h * w + x), None

    return jnp.mean(jax.lax.scan(cell, jnp.zeros(len(batch["x"])), batch["x"].T)[0] ** 2)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_arguments_are_verified():
    with pytest.raises(ad.CollectiveError, match=r"parameter \['steps'\] is of dtype int32"):
        mon.example_norms(recurrent)({"w": jnp.ones(2), "steps": jnp.int32(0)}, rows())
    with pytest.raises(ad.CollectiveError, match=r"\['x'\]: 6, \['y'\]: 3"):
        mon.example_norms(recurrent)(jnp.ones(2), {"x": np.ones((6, 2)), "y": np.ones(3)})
    with pytest.raises(ad.CollectiveError, match=r"^example_norms \(test_example_norms.py:\d+\): .*must be a scalar"):
        mon.example_norms(lambda w, b: b["x"] @ w)(jnp.ones(7), {"x": rows()["x"]})


# --- norms of some examples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["plain", "nnx"])
def test_a_sample_has_the_norms_of_the_first_examples(model):
    make, data = MODELS[model]
    (loss, params), batch = make(), data()

    def both(params, batch):
        return [mon.example_norms(loss, sample=sample)(params, batch) for sample in (None, 2, 99)]

    (_, _, every), (_, grads, two), (_, _, all_there_are) = jax.jit(both)(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[:2], b, rtol=1e-5, atol=1e-9), every, two)
    jax.tree.map(np.testing.assert_array_equal, every, all_there_are)
    assert {n.shape for n in jax.tree.leaves(two)} == {(2,)}
    expected = jax.jit(jax.grad(loss))(params, batch)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-6), grads, expected)


def test_options_are_verified():
    with pytest.raises(ad.CollectiveError, match=r"^example_norms \(test_example_norms.py:\d+\): .*sample=0 must be a"):
        mon.example_norms(recurrent, sample=0)
