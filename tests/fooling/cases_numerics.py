"""Drivers that sum over the workers and another axis, or close over sharded arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
from adaptive.operators.operator_state import operator_state

from .cases import FEATURES, refused, right

BOTH = ("examples", "workers")


def loss(w, batch, axes, mean=jax.lax.pmean):
    """Of predictions that are normalized over `axes`, in a function of one example."""

    def of_one(x, y):
        z = x @ w
        center = mean(z, axes)
        return (z - center) / jnp.sqrt(mean((z - center) ** 2, axes) + 1) - y

    return (jax.vmap(of_one, axis_name="examples")(batch["x"], batch["y"]) ** 2).mean()


def plain_normalized(state, batch):
    value, grad = jax.value_and_grad(loss)(state["w"], batch, "examples")
    return {"w": state["w"] - 0.1 * grad}, {"loss": value}


@right(plain_normalized)
def normalized_over_examples_and_workers(state, batch):
    value, grad = comm.all_reduce(jax.value_and_grad(loss)(state["w"], batch, BOTH))
    return {"w": state["w"] - 0.1 * grad}, {"loss": value}


@refused(ad.CollectiveError, "jax.lax.pmax over 'workers'")
def the_greatest_over_both(state, batch):
    top = jax.vmap(lambda x: jax.lax.pmax(x.sum(), BOTH), axis_name="examples")(batch["x"])
    return state, {"top": comm.all_reduce(top.mean())}


# --- arrays over several devices --------------------------------------------------------------------------------------


@functools.cache
def sharded():
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:FEATURES]), ("model",))
    with jax.ensure_compile_time_eval():  # the first call is in a trace
        return jax.device_put(
            np.ones(3, np.float32), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
        )


@refused(ad.DriverError, "an array that the driver closes over, float32[3], is sharded over 3 devices")
def closes_over_a_sharded_array(state, batch):
    return {"w": state["w"] + comm.all_reduce(batch["x"].mean()) * sharded()}, {}


@refused(ad.CollectiveError, "operator state 'mine' (cases_numerics.py:", "is sharded over 3 devices")
def a_sharded_state_of_an_operator(state, batch):
    mean = comm.all_reduce(batch["x"].mean())
    return {"w": state["w"] + operator_state("mine", sharded(), lambda old: (old + mean, mean))}, {}
