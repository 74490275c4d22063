"""Cases of noise scales: of single examples, in the metric of Adam, and of wrong gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import collectives as comm
import monitors as mon

from .cases import named, right, step

NOT_THE_MEAN = ("a mean that is not its mean over all examples", "noise_scale (cases_noise.py:")


def loss_fn(state, batch):
    return jnp.mean((batch["x"] @ state["w"] - batch["y"]) ** 2)


def squares_of_examples(state, batch):
    rows = jax.vmap(jax.grad(lambda w, x, y: (x @ w - y) ** 2), (None, 0, 0))(state["w"], batch["x"], batch["y"])
    return rows, jnp.sum(rows**2)


def _whole(state, batch):
    (rows, squares), n = squares_of_examples(state, batch), len(batch["y"])
    mean = rows.mean(0)
    return step(state, mean), {"trace": (squares - n * mean @ mean) / (n - 1)}


@right(_whole)
def the_noise_of_single_examples(state, batch):
    _, grads, norms = mon.example_norms(loss_fn)(state, batch)
    average = comm.all_reduce(grads)
    noise = mon.noise_scale(grads, average, per_example=norms, decay=0)
    return step(state, average["w"]), {"trace": noise.trace}


# --- wrong gradients --------------------------------------------------------------------------------------------------


def gradient(w, batch):
    return jax.grad(lambda w: loss_fn({"w": w}, batch))(w)


def clipped(g):
    return g / jnp.maximum(1, 2 * jnp.linalg.norm(g))


def first_half(batch):
    return jax.tree.map(lambda rows: rows[: -(-len(rows) // 2)], batch)


def step_and_noise(state, own, average, **options):
    return step(state, average), {"trace": mon.noise_scale(own, average, **options).trace}


@named(*NOT_THE_MEAN)
def the_noise_of_half_a_batch_beside_the_mean_of_all(state, batch):
    own, average = gradient(state["w"], first_half(batch)), comm.all_reduce(gradient(state["w"], batch))
    return step_and_noise(state, own, average)


@named(NOT_THE_MEAN[0], "gradient_variance (cases_noise.py:")
def the_variance_beside_a_clipped_mean(state, batch):
    own = gradient(state["w"], batch)
    average = clipped(comm.all_reduce(own))
    return step(state, average), {"variance": mon.gradient_variance(own, average)}


@named(*NOT_THE_MEAN)
def norms_beside_another_gradient(state, batch):
    _, grads, norms = mon.example_norms(loss_fn)({"w": state["w"]}, batch)
    average = comm.all_reduce({"w": gradient(1 - state["w"], batch)})
    return step(state, average["w"]), {"trace": mon.noise_scale(grads, average, per_example=norms).trace}
