"""Squared norms of single examples' gradients, against `jax.vmap(jax.grad)`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adaptive as ad
import monitors as mon

KEY = jax.random.key(0)


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


PARAMS = {
    "w": [jax.random.normal(KEY, (7, 8)), jax.random.normal(KEY, (8, 5))],
    "b": [jnp.ones(8), jnp.zeros(5)],
    "temperature": jnp.float32(1.3),
    "unused": jnp.ones(3),
}


def loss_fn(p, batch):
    hidden = jax.nn.gelu(batch["x"] @ p["w"][0] + p["b"][0][None])
    return cross_entropy(p["temperature"] * (hidden @ p["w"][1] + p["b"][1][None]), batch["y"])


def test_norms_are_those_of_gradients_of_each_example_alone():
    """Of all, or of the first ones."""

    def of_samples(params, batch):
        return [mon.example_norms(loss_fn, sample=sample)(params, batch) for sample in (None, np.int64(2), 99)]

    def expected(params, batch):
        return *jax.value_and_grad(loss_fn)(params, batch), by_vmap(loss_fn, params, batch)

    # Compiled as a whole: each operation by itself is compiled, too, and there are hundreds.
    found, (loss, grads, truth) = jax.jit(of_samples)(PARAMS, rows()), jax.jit(expected)(PARAMS, rows())
    for (own_loss, own_grads, norms), count in zip(found, (6, 2, 6), strict=True):
        np.testing.assert_allclose(own_loss, loss, rtol=1e-6)
        jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-6), own_grads, grads)
        jax.tree.map(lambda n, e: np.testing.assert_allclose(n, e[:count], rtol=1e-5, atol=1e-9), norms, truth)  # noqa: B023


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


# --- errors -----------------------------------------------------------------------------------------------------------


def test_arguments_are_verified():
    with pytest.raises(ad.CollectiveError, match=r"parameter \['steps'\] is of dtype int32"):
        mon.example_norms(loss_fn)({"w": jnp.ones(2), "steps": jnp.int32(0)}, rows())
    with pytest.raises(ad.CollectiveError, match=r"\['x'\]: 6, \['y'\]: 3"):
        mon.example_norms(loss_fn)(jnp.ones(2), {"x": np.ones((6, 2)), "y": np.ones(3)})
    with pytest.raises(ad.CollectiveError, match=r"^example_norms \(test_example_norms.py:\d+\): .*must be a scalar"):
        mon.example_norms(lambda w, b: b["x"] @ w)(jnp.ones(7), {"x": rows()["x"]})
    with pytest.raises(ad.CollectiveError, match=r"^example_norms \(test_example_norms.py:\d+\): .*sample=0 must be a"):
        mon.example_norms(loss_fn, sample=0)
