"""Drivers that count workers: a worker that takes no examples, or has left, must not be in any count."""

from __future__ import annotations

import jax.numpy as jnp

import adaptive as ad
import collectives as comm

from .cases import loss, mean_gradient, plain, refused, right, step

ONE = plain(one=lambda s, b: 1.0)


def own_one():
    """1 as a local value, which each worker sends."""
    return (ad.worker_index() >= 0).astype(jnp.float32)


def n_workers():
    return ad.num_workers().astype(jnp.float32)


@right(ONE)
def rows_of_a_local_value_are_counted(state, batch):
    there = jnp.isfinite(comm.all_gather(own_one())).sum()
    return step(state, mean_gradient(state, batch)), {"one": there.astype(jnp.float32) / n_workers()}


@right(ONE)
def a_sum_of_a_sum_counts_twice(state, batch):
    n = comm.all_reduce(comm.all_reduce(1.0, op="sum"), op="sum")
    return step(state, mean_gradient(state, batch)), {"one": n / n_workers() ** 2}


@refused(TypeError, "ad.num_workers() (cases_workers.py:", "ad.capacity()")
def a_shape_of_the_number_of_workers(state, batch):
    return step(state, mean_gradient(state, batch)), {"rows": jnp.zeros(ad.num_workers())}


@refused(TypeError, "ad.num_workers() (cases_workers.py:", "not known while the driver is traced")
def a_branch_on_the_number_of_workers(state, batch):
    factor = 1.0 if ad.num_workers() > 2 else 0.5
    return step(state, factor * mean_gradient(state, batch)), {"loss": comm.all_reduce(loss(state["w"], batch))}
