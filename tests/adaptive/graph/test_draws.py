"""Notes on random numbers that every microbatch draws from one key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import adaptive as ad
import collectives as comm
from adaptive.graph.draws import notes_on_draws
from tests.adaptive.drivers import FEATURES, mean_loss, planner

W = jnp.zeros(FEATURES)


def notes(loss):
    def driver(w, batch):
        return w - comm.all_reduce(jax.grad(loss)(w, batch)), {}

    return notes_on_draws(planner(driver, W).begin(8))


def with_noise(draw):
    """A loss of examples to which `draw(shape)` is added."""
    return lambda w, batch: mean_loss(w, {**batch, "x": batch["x"] + draw(batch["x"].shape)})


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


def test_a_key_from_the_examples_differs_between_microbatches():
    def loss(w, batch):
        key = jax.random.fold_in(ad.step_key(), batch["y"].sum().astype(jnp.int32))
        return with_noise(lambda shape: jax.random.normal(key, shape))(w, batch)

    assert notes(loss) == []
