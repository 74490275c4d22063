"""Drivers that are wrong on purpose, or look as if they were, each with the verdict that it must get.

    refused(error, *texts)   building the program fails, on every worker, and says so
    right(plain)             it simply works: it agrees with `plain`, one worker's step on whole batches, on any split
    named(*leaves)           it runs, and `check` says that it depends on the split, and where
    not_known(*texts)        it runs, and `check` says that it cannot know, and why

A driver is given `{"w": weights of a linear model, …}` as state, and batches of `{"x": features, "y": targets}`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon
from adaptive.operators.operator_state import operator_state

FEATURES = 3
W = np.array([0.3, -0.2, 0.1], np.float32)


@dataclass(frozen=True)
class Case:
    driver: Callable
    verdict: Any
    state: Any
    options: dict[str, Any]


@dataclass(frozen=True)
class Refused:
    error: type[Exception]
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Right:
    plain: Callable[[Any, Any], tuple[Any, Any]]  # (state, whole batch) -> (state, metrics)


@dataclass(frozen=True)
class Checked:
    verdict: str
    texts: tuple[str, ...]  # in what `check` prints


CASES: dict[str, Case] = {}


def refused(error: type[Exception], *texts: str, **options: Any):
    return _case(Refused(error, texts), options)


def right(plain: Callable, **options: Any):
    return _case(Right(plain), options)


def named(*leaves: str, **options: Any):
    return _case(Checked("no", leaves), options)


def not_known(*texts: str, **options: Any):
    return _case(Checked("not known", texts), options)


def _case(verdict: Any, options: dict[str, Any]):
    state = options.pop("state", {"w": W})

    def register(driver: Callable) -> Callable:
        assert driver.__name__ not in CASES
        CASES[driver.__name__] = Case(driver, verdict, state, options)
        return driver

    return register


# --- what the drivers are made of -------------------------------------------------------------------------------------


def errors(w, batch):
    return batch["x"] @ w - batch["y"]


def loss(w, batch):
    return jnp.mean(errors(w, batch) ** 2)


def mean_gradient(state, batch):
    return comm.all_reduce(jax.grad(loss)(state["w"], batch))


def step(state, gradient, **changes):
    return {**state, "w": state["w"] - 0.1 * gradient, **changes}


def plainly(state, batch, **metrics):
    """A step on the whole batch, with metrics given as functions of it."""
    new = step(state, jax.grad(loss)(state["w"], batch))
    return new, {name: of(state, batch) for name, of in metrics.items()}


def plain(**metrics: Callable):
    return functools.partial(plainly, **metrics)


SHAPE = "a number of the batch's shape"
HOST = "comes from the host"


# --- numbers of the batch's shape -------------------------------------------------------------------------------------


@right(
    plain(
        correct=lambda s, b: (b["y"] > 1).sum(),
        count=lambda s, b: len(b["y"]),
        ones=lambda s, b: float(len(b["y"])),
        mask=lambda s, b: len(b["y"]),
        three=lambda s, b: np.full(3, len(b["y"])),
    )
)
def counts_that_follow_from_shapes(state, batch):
    y = batch["y"]
    counts = {
        "correct": (y > 1).sum(),
        "count": len(y),
        "ones": jnp.ones(len(y)).sum(),
        "mask": jnp.ones_like(y, bool).sum(),
        "three": np.full(3, len(y)),
    }
    return step(state, mean_gradient(state, batch)), comm.all_reduce(counts, op="sum")


@right(plain())
def a_mean_by_hand(state, batch):
    total = jax.grad(lambda w: (errors(w, batch) ** 2).sum())(state["w"])
    total, count = comm.all_reduce((total, len(batch["y"])), op="sum")
    return step(state, total / count.astype(float)), {}


@right(lambda s, b: (step(s, jax.grad(lambda w: b["y"].mean() * (b["x"] @ w).mean())(s["w"])), {}))
def a_replicated_factor_on_a_batch_mean(state, batch):
    """Reverse mode puts factor / length where nothing else touches the batch."""
    factor = comm.all_reduce(batch["y"].mean())
    gradient = jax.grad(lambda w: factor * (batch["x"] @ w).mean())(state["w"])
    return step(state, comm.all_reduce(gradient)), {}


@refused(ad.ReplicationError, "new state", SHAPE, "ad.global_batch()", "(cases.py:")
def a_sum_divided_by_the_length(state, batch):
    total = comm.all_reduce(jax.grad(lambda w: (errors(w, batch) ** 2).sum())(state["w"]), op="sum")
    return step(state, total / len(batch["y"])), {}


@refused(ad.ReplicationError, "metric ['n']", SHAPE)
def a_length_for_a_metric(state, batch):
    return step(state, mean_gradient(state, batch)), {"n": len(batch["x"])}


@refused(ad.DriverError, "hook 'grow' closes over it", "ad.global_batch()")
def a_length_in_a_hooks_closure(state, batch):
    n = len(batch["y"])
    gradient = mean_gradient(state, batch)
    ctrl.hook(lambda control, value: control.rescale(global_batch=4 * n), gradient[0], name="grow")
    return step(state, gradient), {}


@refused(ad.DriverError, "pure_callback closes over it")
def a_length_in_a_callbacks_closure(state, batch):
    n, one = len(batch["y"]), jax.ShapeDtypeStruct((), jnp.float32)
    gradient = mean_gradient(state, batch)
    size = ad.replicated(jax.pure_callback(lambda g: np.float32(n), one, gradient[0]))
    return step(state, gradient / size), {}


@refused(ad.DriverError, "is another program for", global_batch=18)
def another_collective_for_some_sizes(state, batch):
    gradient = jax.grad(loss)(state["w"], batch)
    return step(state, comm.all_reduce(gradient, op="max" if len(batch["y"]) % 3 else "mean")), {}


@refused(ad.CollectiveError, "depends on the number of examples", "comm.all_reduce(x.mean(0))", "(cases.py:")
def losses_of_each_example_reduced(state, batch):
    """Elementwise over workers: the first example of each, the second of each, …"""
    return step(state, mean_gradient(state, batch)), {"loss": comm.all_reduce(errors(state["w"], batch) ** 2).mean()}


# --- weights ----------------------------------------------------------------------------------------------------------


@right(plain(loss=lambda s, b: loss(s["w"], b)), microbatch=None)
def weighed_by_the_workers_batch(state, batch):
    """Right in one call per worker, so it stays in one."""
    own = jax.value_and_grad(loss)(state["w"], batch)
    value, gradient = comm.all_reduce(own, weight=ad.batch_size())
    return step(state, gradient), {"loss": value}


@refused(ad.DriverError, "microbatch=3", "ad.microbatch_size()", microbatch=3)
def weighed_by_the_workers_batch_in_microbatches(state, batch):
    return step(state, comm.all_reduce(jax.grad(loss)(state["w"], batch), weight=ad.batch_size())), {}


# --- what is not replicated -------------------------------------------------------------------------------------------


@refused(
    ad.ReplicationError,
    *("state['mean']", "this worker's examples", "new = comm.all_reduce(new)"),
    state={"w": W, "mean": np.zeros(FEATURES, np.float32)},
)
def running_statistics(state, batch):
    return step(state, mean_gradient(state, batch), mean=0.9 * state["mean"] + 0.1 * batch["x"].mean(0)), {}


@refused(
    ad.ReplicationError,
    *("state['scale']", "a loss scale, change it by the reduced gradients"),
    state={"w": W, "scale": np.float32(1)},
)
def a_loss_scale_by_ones_own_gradients(state, batch):
    own = jax.grad(lambda w: state["scale"] * loss(w, batch))(state["w"])
    scale = jnp.where(jnp.isfinite(own).all(), 2 * state["scale"], state["scale"] / 2)
    return step(state, comm.all_reduce(own) / state["scale"], scale=scale), {}


@refused(ad.ReplicationError, "'worker', which each worker measures for itself")
def a_rate_for_each_worker(state, batch):
    return step(state, mean_gradient(state, batch) * (1 + ad.worker_index()).astype(float)), {}


@refused(ad.CollectiveError, "noise_scale (cases.py:", "already averaged", "mon.noise_scale(grads, avg_grads)")
def the_noise_of_an_average(state, batch):
    average = mean_gradient(state, batch)
    return step(state, average), {"noise": mon.noise_scale(2 * average, average).scale}


@refused(ad.CollectiveError, "noise_scale (cases.py:", "can differ between them", "comes from this worker's examples")
def the_noise_of_a_gradient_beside_itself(state, batch):
    own = jax.grad(loss)(state["w"], batch)
    return step(state, comm.all_reduce(own)), {"noise": mon.noise_scale(own, 2 * own).scale}


# --- the host, and other effects --------------------------------------------------------------------------------------

ONE = jax.ShapeDtypeStruct((), jnp.float32)


@refused(ad.ReplicationError, "new state", HOST, "pure_callback", "ad.replicated(x)")
def a_random_number_of_the_host(state, batch):
    rate = jax.pure_callback(lambda _: np.float32(np.random.rand()), ONE, state["w"][0])
    return step(state, rate * mean_gradient(state, batch)), {}


@refused(ad.ReplicationError, "new state", HOST, "rng_uniform")
def a_generator_with_a_state(state, batch):
    return step(state, mean_gradient(state, batch) + jax.lax.rng_uniform(0.0, 1.0, (FEATURES,))), {}


# --- custom derivatives -----------------------------------------------------------------------------------------------


@jax.custom_vjp
def clipped(w):
    return w


clipped.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -1, 1),))


@named("w", shares=None)
def a_gradient_clipped_in_each_call(state, batch):
    """The mean of clipped gradients is not the clipped gradient of the mean."""
    gradient = jax.grad(lambda w: 10 * loss(clipped(w), batch))(state["w"])
    return step(state, comm.all_reduce(gradient)), {}


# --- what depends on the split ----------------------------------------------------------------------------------------


@named("metric ['n']", shares=None)
def a_length_squared(state, batch):
    return step(state, mean_gradient(state, batch)), {"n": comm.all_reduce(len(batch["y"]) ** 2, op="sum")}


@not_known("nothing that follows from it shows it", "cases.py:", shares=None)
def a_loop_until_a_maximum_is_passed(state, batch):
    """The mean over calls of their largest loss: the smaller the calls, the smaller it is."""
    until = 1e-6 * comm.all_reduce(jnp.max(errors(state["w"], batch) ** 2))
    rate = jax.lax.while_loop(lambda rate: rate < until, lambda rate: 2 * rate, jnp.float32(1))
    return step(state, rate * mean_gradient(state, batch)), {}


def whole_rate(state, batch):
    return jnp.where(jnp.max(errors(state["w"], batch) ** 2) > 9, 0.5, 1.0)


@right(lambda s, b: (step(s, whole_rate(s, b) * jax.grad(loss)(s["w"], b)), {}))
def a_rate_by_the_largest_loss_of_all(state, batch):
    largest = comm.all_reduce(jnp.max(errors(state["w"], batch) ** 2), op="max")
    return step(state, jnp.where(largest > 9, 0.5, 1.0) * mean_gradient(state, batch)), {}


# --- workers without examples must not be in any count ----------------------------------------------------------------

ONE_OF_ALL = plain(one=lambda s, b: 1.0)


def own_one():
    """1 as a local value, which each worker sends."""
    return (ad.worker_index() >= 0).astype(jnp.float32)


def n_workers():
    return ad.num_workers().astype(jnp.float32)


@right(ONE_OF_ALL)
def rows_of_a_local_value_are_counted(state, batch):
    there = jnp.isfinite(comm.all_gather(own_one())).sum()
    return step(state, mean_gradient(state, batch)), {"one": there.astype(jnp.float32) / n_workers()}


@right(ONE_OF_ALL)
def a_sum_of_a_sum_counts_twice(state, batch):
    n = comm.all_reduce(comm.all_reduce(1.0, op="sum"), op="sum")
    return step(state, mean_gradient(state, batch)), {"one": n / n_workers() ** 2}


@refused(TypeError, "(cases.py:", "instead of  ad.num_workers()")
def a_shape_of_the_number_of_workers(state, batch):
    return step(state, mean_gradient(state, batch)), {"rows": jnp.zeros(ad.num_workers())}


@refused(TypeError, "(cases.py:", "jnp.where(condition, a, b)")
def a_branch_on_the_number_of_workers(state, batch):
    factor = 1.0 if ad.num_workers() > 2 else 0.5
    return step(state, factor * mean_gradient(state, batch)), {"loss": comm.all_reduce(loss(state["w"], batch))}


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


@refused(ad.CollectiveError, "operator state 'mine' (cases.py:", "is sharded over 3 devices")
def a_sharded_state_of_an_operator(state, batch):
    mean = comm.all_reduce(batch["x"].mean())
    return {"w": state["w"] + operator_state("mine", sharded(), lambda old: (old + mean, mean))}, {}
