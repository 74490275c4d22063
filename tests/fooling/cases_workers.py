"""Drivers that count workers: a worker that takes no examples, or has left, must not be in any count."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import adaptive as ad
import collectives as comm

from .cases import W, errors, loss, mean_gradient, plain, refused, right, step

ONE = plain(one=lambda s, b: 1.0)


def own_one():
    """1 as a local value, which each worker sends."""
    return (ad.worker_index() >= 0).astype(jnp.float32)


def n_workers():
    return ad.num_workers().astype(jnp.float32)


@right(ONE)
def a_sum_of_one_is_the_number_of_workers(state, batch):
    return step(state, mean_gradient(state, batch)), {"one": comm.all_reduce(1.0, op="sum") / n_workers()}


@right(ONE)
def a_sum_of_local_ones_is_the_number_of_workers(state, batch):
    return step(state, mean_gradient(state, batch)), {"one": comm.all_reduce(own_one(), op="sum") / n_workers()}


@right(plain(rate=lambda s, b: 0.1))
def a_replicated_rate_is_averaged_over_the_workers(state, batch):
    rate = comm.all_reduce(0.1, op="sum") / n_workers()
    return {**state, "w": state["w"] - rate * mean_gradient(state, batch)}, {"rate": rate}


@right(plain(decay=lambda s, b: (s["w"] ** 2).sum()))
def a_penalty_is_added_by_each_worker_and_divided_by_their_number(state, batch):
    penalty = comm.all_reduce((state["w"] ** 2).sum(), op="sum") / n_workers()
    return step(state, mean_gradient(state, batch)), {"decay": penalty}


@right(plain())
def a_gradient_and_a_penalty_travel_in_one_sum(state, batch):
    share = comm.all_reduce(1.0, op="sum")
    own = jax.grad(lambda w: (errors(w, batch) ** 2).sum())(state["w"])
    total = comm.all_reduce(own, op="sum") + comm.all_reduce(0.5 * state["w"], op="sum") - share * 0.5 * state["w"]
    return step(state, total / ad.global_batch().astype(jnp.float32)), {}


@right(ONE)
def rows_of_a_replicated_value_are_counted(state, batch):
    there = jnp.isfinite(comm.all_gather(3.0)).sum()
    return step(state, mean_gradient(state, batch)), {"one": there.astype(jnp.float32) / n_workers()}


@right(ONE)
def rows_of_a_local_value_are_counted(state, batch):
    there = jnp.isfinite(comm.all_gather(own_one())).sum()
    return step(state, mean_gradient(state, batch)), {"one": there.astype(jnp.float32) / n_workers()}


@right(ONE)
def rows_of_replicated_and_local_values_are_there_together(state, batch):
    both = jnp.isfinite(comm.all_gather(3.0)) == jnp.isfinite(comm.all_gather(own_one()))
    return step(state, mean_gradient(state, batch)), {"one": both.all().astype(jnp.float32)}


@right(plain(three=lambda s, b: 3.0))
def a_mean_of_gathered_replicated_values(state, batch):
    return step(state, mean_gradient(state, batch)), {"three": jnp.nanmean(comm.all_gather(3.0))}


@right(plain(two=lambda s, b: 2))
def whole_numbers_are_summed_exactly(state, batch):
    two = comm.all_reduce(2, op="sum") // ad.num_workers()
    return step(state, mean_gradient(state, batch)), {"two": two}


@right(plain(two=lambda s, b: 2, three=lambda s, b: 3))
def extremes_of_replicated_values_are_the_values(state, batch):
    found = {"two": comm.all_reduce(2, op="min"), "three": comm.all_reduce(3, op="max")}
    return step(state, mean_gradient(state, batch)), found


@right(ONE)
def a_sum_of_a_sum_counts_twice(state, batch):
    n = comm.all_reduce(comm.all_reduce(1.0, op="sum"), op="sum")
    return step(state, mean_gradient(state, batch)), {"one": n / n_workers() ** 2}


@right(plain(), state={"w": W, "n": jnp.zeros(())})
def a_count_that_is_kept_in_the_state(state, batch):
    kept = comm.all_reduce(1.0, op="sum") - comm.all_reduce(own_one(), op="sum")
    return step(state, mean_gradient(state, batch), n=kept), {}


@right(ONE)
def a_count_within_jit(state, batch):
    count = jax.jit(lambda: comm.all_reduce(1.0, op="sum") / n_workers())
    return step(state, mean_gradient(state, batch)), {"one": count()}


@refused(TypeError, "ad.num_workers() (cases_workers.py:", "ad.capacity()")
def a_shape_of_the_number_of_workers(state, batch):
    return step(state, mean_gradient(state, batch)), {"rows": jnp.zeros(ad.num_workers())}


@refused(TypeError, "ad.num_workers() (cases_workers.py:", "ad.capacity()")
def a_loop_over_the_number_of_workers(state, batch):
    return step(state, mean_gradient(state, batch)), {"sum": sum(range(ad.num_workers()))}


@refused(TypeError, "ad.num_workers() (cases_workers.py:", "not known while the driver is traced")
def a_branch_on_the_number_of_workers(state, batch):
    factor = 1.0 if ad.num_workers() > 2 else 0.5
    return step(state, factor * mean_gradient(state, batch)), {"loss": comm.all_reduce(loss(state["w"], batch))}


@right(plain())
def a_shape_of_the_capacity(state, batch):
    factors = jnp.ones(ad.capacity())[ad.worker_index()]
    own = jax.grad(loss)(state["w"], batch) * factors
    return step(state, comm.all_reduce(own)), {}
