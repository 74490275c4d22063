"""Errors in the trace of a driver say what to write instead, whatever raises them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from tests.adaptive.drivers import FEATURES, planner

W = jnp.zeros(FEATURES)


def errors(w, batch):
    return (batch["x"] @ w - batch["y"]) ** 2


def loss(w, batch):
    return errors(w, batch).mean()


def step(w, batch, of=loss):
    return w - 0.1 * comm.all_reduce(jax.grad(of)(w, batch)), {}


def raised(driver, examples=8, kind=Exception, further=()):
    plan = planner(driver, W)

    def build():
        plan.begin(examples)
        for more in further:
            plan(more)

    with pytest.raises(kind) as caught:
        build()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


# --- axes and devices -------------------------------------------------------------------------------------------------


def in_a_helper(x):
    return jax.lax.psum(x, axis_name="data")


@pytest.mark.parametrize(
    ("reduce", "axis"),
    [
        (lambda x: jax.lax.pmean(x, "batch"), "batch"),
        (lambda x: jax.lax.pmax(x, ("hosts", "devices")), "hosts"),
        (lambda x: x / jax.lax.axis_size("i") + jax.lax.axis_index("i"), "i"),
        (jax.jit(in_a_helper), "data"),
    ],
)
def test_a_reduction_over_an_axis_of_another_program(reduce, axis):
    def driver(w, batch):
        return w - reduce(jax.grad(loss)(w, batch)), {}

    said = raised(driver, kind=ad.CollectiveError)
    assert "driver 'driver' (test_driver_errors.py:" in said
    assert f"over the axis '{axis}', which a driver does not have" in said
    assert "comm.all_reduce(x)" in said


def over_two_devices(of):
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:2]), ("d",))
    rows, all_ = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    return {
        "shard_map": lambda x: jax.shard_map(of, mesh=mesh, in_specs=rows, out_specs=rows)(x),
        "pmap": lambda x: jax.pmap(of)(x.reshape(2, -1)).reshape(-1),
        "jit": jax.jit(of, in_shardings=jax.sharding.NamedSharding(mesh, rows)),
        "in a loop": lambda x: jax.lax.map(
            lambda row: jax.lax.with_sharding_constraint(row, jax.sharding.NamedSharding(mesh, all_)), of(x)
        ),
    }


@pytest.mark.parametrize("how", ["shard_map", "pmap", "jit", "in a loop"])
def test_several_devices_in_a_driver(how):
    def driver(w, batch):
        return w - 0.1 * comm.all_reduce(over_two_devices(jnp.square)[how](batch["y"]).mean()), {}

    said = raised(driver, kind=ad.DriverError)
    assert "(test_driver_errors.py:" in said
    assert "is over 2 devices, but a driver runs on the one device of its worker" in said


# --- values that are not numbers yet ----------------------------------------------------------------------------------


def branches(w, batch):
    if loss(w, batch) > 1:
        w = 0 * w
    return step(w, batch)


def loops(w, batch):
    for _ in range(ad.step_number()):
        w = 2 * w
    return step(w, batch)


def masks(w, batch):
    return step(w, {"x": batch["x"][batch["y"] > 0], "y": batch["y"][batch["y"] > 0]})


def looks_up(w, batch):
    return step(w, {**batch, "y": np.arange(9.0)[batch["y"].astype(jnp.int32)]})


def prints(w, batch):
    print(f"{loss(w, batch):.3f}")
    return step(w, batch)


def converts(convert):
    def driver(w, batch):
        return step(w, batch)[0], {"loss": convert(comm.all_reduce(loss(w, batch)))}

    return driver


@pytest.mark.parametrize(
    "driver",
    [branches, loops, masks, looks_up, prints]
    + [converts(convert) for convert in (float, np.asarray, lambda x: x.item())],
)
def test_a_driver_that_needs_a_number(driver):
    said = raised(driver)
    assert "(test_driver_errors.py:" in said
    for text in (
        "jnp.where(condition, a, b)",
        "ctrl.hook(fn, loss)",
        "jnp.asarray(table)[i]",
        'return state, {"loss": loss}',
    ):
        assert text in said


def test_an_error_of_the_drivers_own_is_raised_as_it_is():
    def driver(w, batch):
        raise KeyError("labels")

    said = raised(driver, kind=KeyError)
    assert said.startswith("'labels'")
    assert "driver" not in said


# --- batches that are too small ---------------------------------------------------------------------------------------


def hardest(w, batch):
    return jax.lax.top_k(errors(w, batch), 4)[0].mean()


def own_check(w, batch):
    if len(batch["y"]) < 4:
        raise ValueError("too few negatives")
    return loss(w, batch)


def too_small(said, examples):
    assert "(test_driver_errors.py:" in said
    assert f"cannot run on {examples} example" in said
    for text in ("1 or 3 examples", "microbatch=", "min(4, len(x))", "ad.minibatches(batch, 4)", "resizable=False"):
        assert text in said


@pytest.mark.parametrize("of", [hardest, own_check])
def test_a_driver_for_batches_of_some_sizes(of):
    def driver(w, batch):
        return step(w, batch, of)

    too_small(raised(driver, 3, ad.DriverError), 3)  # the first size, as by microbatch=3
    too_small(raised(driver, 16, ad.DriverError, further=[12, 3]), 3)  # another size, later
    too_small(raised(driver, 16, ad.DriverError, further=[1]), 1)
