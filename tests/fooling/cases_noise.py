"""Cases of noise scales whose groups are single examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import adaptive as ad
import collectives as comm
import monitors as mon

from .cases import FEATURES, refused, right, step


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


@refused(ad.CollectiveError, "example_norms (cases_noise.py:", "uses a sum over examples")
def norms_of_examples_that_are_normalized_together(state, batch):
    def together(state, batch):
        guess = batch["x"] @ state["w"] - batch["y"]
        return jnp.mean(guess**2) / (1 + guess.std())

    _, grads, norms = mon.example_norms(together)(state, batch)
    average = comm.all_reduce(grads)
    return step(state, average["w"]), {"trace": mon.noise_scale(grads, average, per_example=norms).trace}


@refused(ad.CollectiveError, "noise_scale (cases_noise.py:", "squared gradient norm of each example")
def norms_of_half_of_the_examples(state, batch):
    half = jax.tree.map(lambda rows: rows[: len(rows) // 2], batch)
    _, grads, norms = mon.example_norms(loss_fn)(state, half)
    average = comm.all_reduce(grads)
    return step(state, average["w"]), {"trace": mon.noise_scale(grads, average, per_example=norms).trace}


@refused(ad.CollectiveError, "noise_scale (cases_noise.py:", "squared gradient norm of each example")
def norms_that_are_sums_over_examples(state, batch):
    _, grads, norms = mon.example_norms(loss_fn)(state, batch)
    average = comm.all_reduce(grads)
    sums = jax.tree.map(jnp.sum, norms)
    return step(state, average["w"]), {"trace": mon.noise_scale(grads, average, per_example=sums).trace}


@refused(ad.CollectiveError, "noise_scale (cases_noise.py:", "already averaged")
def norms_beside_an_average(state, batch):
    _, grads, norms = mon.example_norms(loss_fn)(state, batch)
    average = comm.all_reduce(grads)
    twice = jax.tree.map(lambda g: 2 * g, average)
    return step(state, average["w"]), {"trace": mon.noise_scale(twice, average, per_example=norms).trace}


@refused(ad.CollectiveError, "noise_scale (cases_noise.py:", "cannot tell layers apart")
def layers_that_are_one(state, batch):
    grads = {"a": batch["x"].mean(0), "b": batch["x"].mean(0)}
    noise = mon.noise_scale(grads, comm.all_reduce(grads), by=lambda path: "layer")
    return step(state, jnp.zeros(FEATURES)), {"trace": noise["layer"].trace}
