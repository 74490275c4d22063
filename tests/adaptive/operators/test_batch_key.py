"""One key for a batch, whose numbers are drawn by example: on any split the same, in models that take one key."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import adaptive as ad
import collectives as comm
from adaptive.graph.draws import notes_on_draws
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import FEATURES, make_data, planner, traced

W = jnp.ones(FEATURES)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x)


def by_linen(key, x):
    return Linen().apply({}, x, rngs={"dropout": key})


def by_nnx(key, x):
    return nnx.Dropout(0.5)(x, rngs=nnx.Rngs(dropout=key))


def driver_of(dropout, key):
    def driver(w, batch):
        def loss_fn(w):
            return jnp.mean((dropout(key(), batch["x"] * w[None]).sum(1) - batch["y"]) ** 2)

        return w - 0.1 * comm.all_reduce(jax.grad(loss_fn)(w)), {}

    return driver


def check(driver):
    with ad.Program(driver, W, make_data(), global_batch=12, world=LocalWorld(2), resizable=False) as program:
        return program.check()


def test_dropout_by_it_does_not_depend_on_the_split():
    found = check(driver_of(by_linen, ad.batch_key))
    assert found.verdict == "yes", found


def test_models_take_it_as_they_are():
    by_rows, by_place = (planner(driver_of(by_nnx, key), W).begin(8) for key in (ad.batch_key, ad.step_key))
    assert notes_on_draws(by_rows) == []
    assert len(notes_on_draws(by_place)) == 1


def test_draws_in_a_loop_have_a_row_for_each_example():
    def driver_of(key, rows):
        def driver(w, batch):
            keys = jax.random.split(key(), 3)
            noise = jax.lax.map(lambda one: jax.random.normal(one, (rows, FEATURES)), keys).sum(0)
            return w - comm.all_reduce((batch["x"][:rows] * noise).sum(0)), {}

        return driver

    traced(driver_of(ad.batch_key, 4), W)
    with pytest.raises(ad.CollectiveError, match=r"shape \(3, \d+\) are drawn from ad.batch_key\(\) \(test_batch_key"):
        traced(driver_of(ad.batch_key, 3), W)


def test_parts_of_a_batch_have_numbers_of_their_own_by_keys_of_examples():
    """One key for the batch would give each part the same numbers."""

    def driver_of(whole):
        def driver(w, batch):
            key = ad.batch_key()

            def local_step(w, part):
                rows = part["x"].shape
                own = jax.vmap(lambda one: jax.random.bernoulli(one, 0.5, rows[1:]))
                kept = jax.random.bernoulli(key, 0.5, rows) if whole else own(part["keys"])
                return w - 0.1 * jnp.where(kept, part["x"], 0).mean(0), kept

            parts = ad.minibatches({**batch, "keys": ad.example_keys()}, 2)
            new, kept = jax.lax.scan(local_step, w, parts)
            return w + comm.all_reduce(new - w), {"kept": comm.all_gather(kept)}

        return driver

    with pytest.raises(ad.CollectiveError, match=r'In local steps .*\n    \{\*\*batch, "keys": ad.example_keys\(\)\}'):
        traced(driver_of(True), W)
    options = {"global_batch": 12, "world": LocalWorld(1), "resizable": False}
    with ad.Program(driver_of(False), W, make_data(), **options) as program:
        (parts,) = np.asarray(program.step().metrics["kept"])
    assert (parts[0] != parts[1]).any()


def test_it_is_a_key_like_others():
    key = ad.batch_key()  # outside a program, of the first example on
    draw = jax.random.bernoulli(jax.random.fold_in(key, 3), 0.5, (64, 8))
    assert 0.4 < draw.mean() < 0.6
    assert len(np.unique(draw, axis=0)) > 32  # rows differ
    np.testing.assert_array_equal(draw[:5], jax.random.bernoulli(jax.random.fold_in(key, 3), 0.5, (5, 8)))
    first, second = jax.random.split(key)
    assert (jax.random.uniform(first, (4, 4)) != jax.random.uniform(second, (4, 4))).any()


def test_a_worker_without_examples_keeps_no_keys():
    """Keys of a batch, and of its examples, that a message lies between."""

    def driver(w, batch):
        key, keys = ad.batch_key(), ad.example_keys()
        mean = comm.all_reduce(jnp.mean(batch["y"] + jax.random.normal(key, batch["y"].shape)))
        noise = jax.random.uniform(key, batch["y"].shape) + jax.vmap(jax.random.normal)(keys)
        return w + comm.all_reduce(jnp.mean(noise * mean)), {}

    states = []
    for shares in ([1, 0], [1, 1]):
        options = {"global_batch": 12, "shares": shares, "world": LocalWorld(2), "resizable": False}
        with ad.Program(driver, jnp.zeros(()), make_data(), **options) as program:
            program.step()
            states.append(float(program.state))
    assert states[0] == pytest.approx(states[1], rel=1e-5)


@pytest.mark.parametrize("shape", [(FEATURES,), (1, FEATURES), ()])
def test_a_key_without_a_row_per_example_is_refused(shape):
    def driver(state, batch):
        mask = jax.random.bernoulli(ad.batch_key(), 0.5, shape)
        return state + comm.all_reduce(batch["y"].mean() * mask.astype(jnp.float32).mean()), {}

    with pytest.raises(ad.CollectiveError, match=r"of shape .* from ad.batch_key\(\) \(test_batch_key.py:") as caught:
        traced(driver, 0.0, examples=4)
    assert "ad.step_key()" in str(caught.value)
