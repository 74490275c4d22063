"""Notes on random numbers that every microbatch draws from one key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import adaptive as ad
import collectives as comm
from adaptive.graph.draws import notes_on_draws
from tests.adaptive.drivers import FEATURES, mean_loss, planner

W = jnp.zeros(FEATURES)


def notes(loss, before=lambda g: g, after=lambda g: g):
    def driver(w, batch):
        return w - after(comm.all_reduce(before(jax.grad(loss)(w, batch)))), {}

    return notes_on_draws(planner(driver, W).begin(8))


def with_noise(draw):
    """A loss of examples to which `draw(shape)` is added."""
    return lambda w, batch: mean_loss(w, {**batch, "x": batch["x"] + draw(batch["x"].shape)})


def noise(g):
    return g + jax.random.normal(ad.step_key(), g.shape)


@pytest.mark.parametrize(
    "draw",
    [
        lambda shape: jax.random.normal(ad.step_key(), shape),
        jax.jit(lambda shape: jax.random.uniform(ad.step_key(), shape), static_argnums=0),
        lambda shape: jax.random.bernoulli(jax.random.key(0), 0.5, shape).astype(jnp.float32),
    ],
    ids=["normal", "jit", "a constant key"],
)
def test_rows_from_one_key_are_noted(draw):
    (note,) = notes(with_noise(draw))
    assert "the rows of a microbatch from one key (test_draws.py:" in note


@pytest.mark.parametrize(
    "draw",
    [
        lambda shape: jax.random.normal(ad.batch_key(), shape),
        lambda shape: jax.vmap(lambda key: jax.random.normal(key, shape[1:]))(ad.example_keys()),
        lambda shape: jax.random.normal(ad.step_key(), shape[1:])[None],  # one for all examples, on any split
        lambda shape: jax.random.normal(ad.step_key(), (8, 3)).sum(0)[None],  # as many rows by chance
    ],
    ids=["batch_key", "example_keys", "shared", "by chance"],
)
def test_draws_that_no_split_changes_are_not(draw):
    assert notes(with_noise(draw)) == []


def test_noise_on_the_gradient_of_a_microbatch_is_noted():
    (note,) = notes(mean_loss, before=noise)
    assert "are added to a sum or mean of each microbatch (test_draws.py:" in note
    assert notes(mean_loss, after=noise) == []
    assert notes(lambda w, batch: mean_loss(noise(w), batch)) == []


def test_private_gradients_before_the_reduction_are_noted():
    tx = optax.contrib.differentially_private_aggregate(1.0, 0.5, key=jax.random.key(1))

    def driver(state, batch):
        w, opt_state = state
        each = jax.vmap(lambda row: jax.grad(mean_loss)(w, jax.tree.map(lambda a: a[None], row)))(batch)
        updates, opt_state = tx.update(each, opt_state, w)
        return (w + comm.all_reduce(updates), opt_state), {}

    (note,) = notes_on_draws(planner(driver, (W, tx.init(W))).begin(8))
    assert "after comm.all_reduce" in note
