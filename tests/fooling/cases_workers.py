"""Drivers that count workers: a worker that takes no examples, or has left, must not be in any count."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import adaptive as ad
import collectives as comm

from .cases import W, loss, mean_gradient, plain, refused, right, step

ONE = plain(one=lambda s, b: 1.0)


def own_one():
    """1 as a local value, which each worker sends."""
    return (ad.worker_index() >= 0).astype(jnp.float32)


def n_workers():
    return ad.num_workers().astype(jnp.float32)


@right(ONE)
def a_sum_of_one_is_the_number_of_workers(state, batch):
    return step(state, mean_gradient(state, batch)), {"one": comm.all_reduce(1.0, op="sum") / n_workers()}


@right(plain(decay=lambda s, b: (s["w"] ** 2).sum()))
def a_penalty_is_added_by_each_worker_and_divided_by_their_number(state, batch):
    penalty = comm.all_reduce((state["w"] ** 2).sum(), op="sum") / n_workers()
    return step(state, mean_gradient(state, batch)), {"decay": penalty}


@right(ONE)
def rows_of_a_local_value_are_counted(state, batch):
    there = jnp.isfinite(comm.all_gather(own_one())).sum()
    return step(state, mean_gradient(state, batch)), {"one": there.astype(jnp.float32) / n_workers()}


@right(ONE)
def a_sum_of_a_sum_counts_twice(state, batch):
    n = comm.all_reduce(comm.all_reduce(1.0, op="sum"), op="sum")
    return step(state, mean_gradient(state, batch)), {"one": n / n_workers() ** 2}


@right(plain(), state={"w": W, "n": jnp.zeros(())})
def a_count_that_is_kept_in_the_state(state, batch):
    kept = comm.all_reduce(1.0, op="sum") - comm.all_reduce(own_one(), op="sum")
    return step(state, mean_gradient(state, batch), n=kept), {}


@refused(TypeError, "ad.num_workers() (cases_workers.py:", "ad.capacity()")
def a_shape_of_the_number_of_workers(state, batch):
    return step(state, mean_gradient(state, batch)), {"rows": jnp.zeros(ad.num_workers())}


@refused(TypeError, "ad.num_workers() (cases_workers.py:", "not known while the driver is traced")
def a_branch_on_the_number_of_workers(state, batch):
    factor = 1.0 if ad.num_workers() > 2 else 0.5
    return step(state, factor * mean_gradient(state, batch)), {"loss": comm.all_reduce(loss(state["w"], batch))}


@right(plain())
def a_shape_of_the_capacity(state, batch):
    factors = jnp.ones(ad.capacity())[ad.worker_index()]
    own = jax.grad(loss)(state["w"], batch) * factors
    return step(state, comm.all_reduce(own)), {}
