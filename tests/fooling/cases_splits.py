"""Drivers that hide from `check` that their step depends on the split, or look as if it did."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adaptive as ad
import collectives as comm
from tests.relaxed import relaxed_tx

from .cases import W, errors, loss, mean_gradient, named, not_known, plain, right, step

# --- one element beside another that is a million times as large ------------------------------------------------------

SCALE = np.array([1e6, 1, 1], np.float32)


def normalized_beside_a_large_feature(w, batch):
    """The second and third feature are normalized over the call; the first is as large as a price or a time."""
    x = batch["x"]
    normed = (x - x.mean(0)[None]) / (x.std(0)[None] + 1e-3)
    large = jnp.mean((1e6 * x[:, 0] * w[0] - batch["y"]) ** 2)
    return large + jnp.mean((normed[:, 1:] @ w[1:] - batch["y"]) ** 2)


def scaled(w, batch):
    return jnp.mean(((batch["x"] * SCALE[None]) @ w - batch["y"]) ** 2)


def trained(tx, loss_fn, state, batch):
    gradient = comm.all_reduce(jax.grad(loss_fn)(state["w"], batch))
    updates, opt = tx.update(gradient, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, {}


ADAM = relaxed_tx(optax.adam(0.1))


def of(tx, w=W):
    return {"shares": None, "state": {"w": w, "opt": tx.init(w)}}


@named("mu", **of(ADAM))
def a_normalized_feature_beside_a_large_one_under_adam(state, batch):
    return trained(ADAM, normalized_beside_a_large_feature, state, batch)


@right(lambda s, b: (step(s, jnp.sign(jax.grad(scaled)(s["w"], b))), {}))
def signs_of_gradients_beside_a_large_one(state, batch):
    return step(state, jnp.sign(comm.all_reduce(jax.grad(scaled)(state["w"], batch)))), {}


# --- numbers of the batch's shape, in metrics and hook values ---------------------------------------------------------


@named("metric ['n']", shares=None)
def a_length_squared(state, batch):
    return step(state, mean_gradient(state, batch)), {"n": comm.all_reduce(len(batch["y"]) ** 2, op="sum")}


@right(plain(n=lambda s, b: len(b["y"]), mean=lambda s, b: b["y"].mean()))
def lengths_that_only_add_up(state, batch):
    n = len(batch["y"])
    total, count = comm.all_reduce((batch["y"].sum(), 1.0 * n), op="sum")
    seen = {"n": comm.all_reduce(jnp.ones(n).sum(), op="sum"), "mean": total / count}
    return step(state, mean_gradient(state, batch)), seen


# --- decisions --------------------------------------------------------------------------------------------------------


def mean_of_largest(state, batch):
    """The mean over calls of their largest loss: the smaller the calls, the smaller it is."""
    return comm.all_reduce(jnp.max(errors(state["w"], batch) ** 2))


HIDDEN = "nothing that follows from it shows it"


@not_known(HIDDEN, shares=None)
def a_rate_by_a_comparison_that_small_calls_change(state, batch):
    """No call of some examples is without one that is far off; a call of one example mostly is."""
    rate = jnp.where(mean_of_largest(state, batch) < 0.5 * comm.all_reduce(loss(state["w"], batch)) + 1.5, 0.5, 1.0)
    return step(state, rate * mean_gradient(state, batch)), {}


@not_known(HIDDEN, "cases_splits.py:", shares=None)
def a_loop_until_a_maximum_is_passed(state, batch):
    until = 1e-6 * mean_of_largest(state, batch)
    rate = jax.lax.while_loop(lambda rate: rate < until, lambda rate: 2 * rate, jnp.float32(1))
    return step(state, rate * mean_gradient(state, batch)), {}


# --- decisions that are the same on any split -------------------------------------------------------------------------


def whole_rate(state, batch, scale=1.0):
    return jnp.where(jnp.max(errors(state["w"], batch) ** 2) > 9, 0.5, 1.0) * scale


@right(lambda s, b: (step(s, whole_rate(s, b) * jax.grad(loss)(s["w"], b)), {}))
def a_rate_by_the_largest_loss_of_all(state, batch):
    largest = comm.all_reduce(jnp.max(errors(state["w"], batch) ** 2), op="max")
    return step(state, jnp.where(largest > 9, 0.5, 1.0) * mean_gradient(state, batch)), {}


@right(plain(bad=lambda s, b: False))
def a_step_that_is_left_out_where_a_maximum_is_not_finite(state, batch):
    """The maxima differ; that they are finite does not."""
    largest = mean_of_largest(state, batch)
    new = step(state, jnp.where(jnp.isfinite(largest), 1.0, 0.0) * mean_gradient(state, batch))
    return new, {"bad": jnp.isnan(largest) | jnp.isinf(largest)}


@right(plain(calls=lambda s, b: 1), shares=None, global_batch=12)
def a_source_made_of_no_examples(state, batch):
    """Local batches differ, and a metric may say so."""
    size = comm.all_reduce(ad.batch_size(), op="max")
    return step(state, mean_gradient(state, batch)), {"calls": jnp.minimum(size, 1)}
