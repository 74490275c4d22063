"""`jax.lax.pmean(x, "workers")` in a driver: what JAX makes of it is a mean over examples, and nothing else is."""

from __future__ import annotations

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.errors import CollectiveError
from adaptive.operators.collectives import collective_p
from adaptive.runtime.local_world import LocalWorld
from tests.adaptive.drivers import FEATURES, make_data, traced
from tests.relaxed import relaxed

W = jnp.zeros(FEATURES)
UNEVEN = {"shares": [5, 1, 6], "microbatch": 2, "resizable": False}  # of three workers, each in several calls


def pmean(x):
    return jax.lax.pmean(x, "workers")


def collectives_of(driver, state=0.0):
    return [e for e in traced(driver, state).eqns if e.primitive is collective_p]


def test_a_mean_in_the_forward_pass_has_a_derivative():
    """Of values that JAX's own sum, over an axis of so many, would take beyond half precision's range."""
    data = jax.tree.map(lambda a: (a + 100).astype(np.float16), make_data())

    def loss_fn(w, x, y, mean):
        z = x @ w
        center, square = mean((z.mean(), (z * z).mean() / 8))
        return ((z / 16 - y - center) ** 2).mean() / 64 + square / 512

    def driver(w, batch):
        loss, grads = comm.all_reduce(jax.value_and_grad(loss_fn)(w, batch["x"], batch["y"], pmean))
        return w - grads, {"loss": loss, "grads": grads}

    w = jnp.asarray([0.1, -0.2, 0.3], np.float16)
    with ad.Program(driver, w, data, global_batch=24, world=LocalWorld(3), **UNEVEN) as program:
        ours = program.step().metrics
    theirs = jax.value_and_grad(loss_fn)(w, data["x"], data["y"], lambda x: x)
    assert ours["loss"] == pytest.approx(float(theirs[0]), rel=2e-2)
    np.testing.assert_allclose(ours["grads"], theirs[1], rtol=2e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_mean_over_the_mapped_examples_and_the_workers_has_a_derivative(dtype):
    """As equinox takes it, in a function of one example."""
    data = jax.tree.map(lambda a: a.astype(jnp.float32), make_data())

    def loss_fn(w, batch, axes):
        def of_one(x, y):
            z = (x @ w).astype(dtype)
            center = jax.lax.pmean(z, axes)
            square = jax.lax.pmean((z - center) ** 2, axes)
            return ((z - center) / jnp.sqrt(square + jnp.asarray(1, dtype))).astype(jnp.float32) * y + square.astype(
                jnp.float32
            )

        return jax.vmap(of_one, axis_name="batch")(batch["x"], batch["y"]).mean()

    def driver(w, batch):
        loss, grads = jax.value_and_grad(loss_fn)(w, batch, ("batch", "workers"))
        return w, comm.all_reduce({"loss": loss, "grads": grads})

    w = jnp.asarray([0.1, -0.2, 0.3], jnp.float32)
    with ad.Program(driver, w, data, global_batch=24, world=LocalWorld(3), **UNEVEN) as program:
        ours = program.step().metrics
    theirs = jax.value_and_grad(loss_fn)(w, data, "batch")
    tolerance = {"bfloat16": 1e-1, "float32": 1e-5}[dtype]
    assert ours["loss"] == pytest.approx(float(theirs[0]), rel=tolerance)
    np.testing.assert_allclose(ours["grads"], theirs[1], rtol=tolerance, atol=tolerance)


class Net(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    second: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, axes, mode):
        first, last = jax.random.split(jax.random.key(0))
        self.first, self.last = eqx.nn.Linear(FEATURES, 6, key=first), eqx.nn.Linear(6, "scalar", key=last)
        self.norm = eqx.nn.BatchNorm(6, axis_name=axes, mode=mode)
        self.second = eqx.nn.BatchNorm(6, axis_name=axes, mode=mode)

    def __call__(self, x, stats):
        x, stats = self.norm(self.first(x), stats)
        x, stats = self.second(jax.nn.tanh(x), stats)
        return self.last(jax.nn.relu(x)), stats


@pytest.mark.parametrize("mode", ["batch", pytest.param("ema", marks=pytest.mark.long)])
def test_equinox_normalizes_by_the_whole_steps_batch(mode):
    """Against a plain loop on whole batches: uneven workers, in several calls, and a step at another split."""

    def training(axes):
        model, stats = eqx.nn.make_with_state(Net)(axes, mode)
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def loss_fn(params, stats, batch):
            model = eqx.combine(params, static)
            mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            predicted, stats = relaxed(mapped)(batch["x"], stats)
            return ((predicted - batch["y"]) ** 2).mean(), stats

        return (params, stats), jax.value_and_grad(relaxed(loss_fn), has_aux=True)

    def stepped(state, grads, stats):
        return jax.tree.map(lambda p, g: p - 0.1 * g, state[0], grads), stats

    state, value_and_grad = training(("batch", "workers"))

    def driver(state, batch):
        (loss, stats), grads = value_and_grad(*state, batch)
        return stepped(state, comm.all_reduce(grads), stats), {"loss": comm.all_reduce(loss)}

    data = jax.tree.map(lambda a: a.astype(np.float32), make_data())
    options = {"shares": [5, 1, 6], "microbatch": 2}
    with ad.Program(driver, state, data, global_batch=24, world=LocalWorld(3), **options) as program:
        ours = [float(program.step().metrics["loss"]) for _ in range(2)]
        program.rescale(shares=[1, 1, 1])
        ours += [float(program.step().metrics["loss"]) for _ in range(2)]
        end = jax.tree.leaves(program.state)
    plain, value_and_grad = training("batch")
    theirs = []
    for _ in range(4):  # an epoch is one batch: its order does not matter
        (loss, stats), grads = value_and_grad(*plain, data)
        plain = stepped(plain, grads, stats)
        theirs.append(float(loss))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    for own, other in zip(end, jax.tree.leaves(plain), strict=True):
        assert own.dtype == other.dtype
        np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "inside",
    [jax.jit, lambda f: jax.vmap(f, in_axes=1), lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]],
    ids=["jit", "vmap", "jvp"],
)
def test_it_may_stand_inside(inside):
    graph = collectives_of(lambda s, b: (s + inside(pmean)(b["x"]).sum(), {}), 0.0)
    assert {e.params["how"].name for e in graph} == {"pmean"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: jax.lax.psum(x, "workers"), "jax.lax.psum over 'workers' (test_axis.py:"),
        (lambda x: jax.lax.psum(jnp.sin(x / 4096), "workers"), "jax.lax.psum over 'workers' (test_axis.py:"),
        (lambda x: jax.lax.pmax(x, "workers"), 'comm.all_reduce(x, op="sum")'),
        (lambda x: x * jax.lax.axis_index("workers").astype(x.dtype), "ad.worker_index()"),
        (lambda x: x / jax.lax.axis_size("workers"), "axis_size, over 'workers' (test_axis.py:"),
        (lambda x: x * (1 / jax.lax.psum(1, "workers")), "ad.num_workers()"),
        (lambda x: jax.lax.pmean(x, "workers", axis_index_groups=[range(4096)]), "jax.lax.psum over 'workers'"),
        (lambda x: jax.lax.scan(lambda c, _: (pmean(c), None), x, length=2)[0], "is inside jax.lax.scan"),
        (lambda x: jax.grad(jax.checkpoint(lambda x: pmean(x * x)))(x), "is inside jax.checkpoint"),
        (
            lambda x: jax.vmap(lambda r: jax.lax.psum(r, ("rows", "workers")), axis_name="rows")(x[None])[0],
            "jax.lax.psum over 'workers' (test_axis.py:",
        ),
    ],
    ids=[
        "psum",
        "of a quotient",
        "pmax",
        "axis_index",
        "axis_size",
        "psum of a number",
        "groups",
        "scan",
        "checkpoint",
        "two axes",
    ],
)
def test_collectives_other_than_means_are_refused(call, says):
    with pytest.raises(ad.CollectiveError) as caught:
        traced(lambda s, b: (s + call(b["y"].mean()), {}), 0.0)
    assert says in str(caught.value)


def driver_with_a_mesh_of_its_own(axis, *, scanned=False, ours=False):
    """A loss that is summed by jax.shard_map over an axis of one device, called `axis`."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), (axis,))
    spec = jax.sharding.PartitionSpec

    @partial(jax.shard_map, mesh=mesh, in_specs=spec(axis), out_specs=spec())
    def total(x):
        return jax.lax.psum(x.sum(0), axis)

    def driver(w, batch):
        def loss_fn(w):
            errors = (batch["x"] @ w - batch["y"]) ** 2
            if ours:
                errors = errors + pmean(batch["y"].mean())
            if scanned:
                return jax.lax.scan(lambda c, x: (c + total(x[None]), 0), 0.0, errors)[0] / 8
            return total(errors) / 8

        loss, grads = comm.all_reduce(jax.value_and_grad(loss_fn)(w))
        return w - grads, {"loss": loss}

    return driver


@pytest.mark.parametrize("options", [{"scanned": True}, {"ours": True}], ids=str)
def test_a_drivers_own_axis_may_be_called_as_the_workers_is(options):
    def course(axis):
        driver = driver_with_a_mesh_of_its_own(axis, **options)
        with ad.Program(driver, W, make_data(), global_batch=24, world=LocalWorld(3), resizable=False) as program:
            return [float(report.metrics["loss"]) for report in program.run(steps=3)]

    assert course("workers") == course("devices")


def test_within_another_axis_the_workers_are_still_the_workers():
    def driver(w, batch):
        mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("devices",))
        spec = jax.sharding.PartitionSpec("devices")
        within = jax.shard_map(pmean, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return w, {"x": comm.all_reduce(within(batch["y"]).sum())}

    with pytest.raises(CollectiveError, match=r"pmean \(test_axis.py:\d+\) is inside shard_map"):
        traced(driver, W)
