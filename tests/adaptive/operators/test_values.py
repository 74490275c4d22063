"""What a driver may ask: numbers of the step that cost no recompile, and keys that belong to examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.runtime.local_world import LocalWorld


def numbers(state, batch):
    found = {
        "step": ad.step_number(),
        "global_batch": ad.global_batch(),
        "batch_size": comm.all_reduce(ad.batch_size(), op="max"),
        "worker": comm.all_reduce(ad.worker_index(), op="sum"),
        "workers": jnp.asarray(ad.num_workers()),
        "key": jax.random.key_data(ad.step_key()),
    }
    return state, found


def test_outside_a_program_they_stand_for_one_worker_in_its_first_step():
    _, found = numbers(0.0, None)
    key = found.pop("key")
    assert {k: int(v) for k, v in found.items()} == {
        "step": 0, "global_batch": 1, "batch_size": 1, "worker": 0, "workers": 1
    }  # fmt: skip
    assert np.array_equal(key, jax.random.key_data(jax.random.fold_in(jax.random.key(0), 0)))
    batch = {"x": jnp.zeros((5, 2))}
    assert ad.example_keys(batch).shape == (5,)
    with pytest.raises(ad.CollectiveError, match=r"Pass the batch: +ad.example_keys\(batch\)"):
        ad.example_keys()


def test_the_number_of_workers_outside_a_program_is_that_of_the_world_entered():
    with comm.DeviceWorld(jax.local_devices()[:3]):
        assert ad.num_workers() == 3
    assert ad.num_workers() == 1


def test_scalars_are_int32_under_double_precision_too():
    with jax.enable_x64(True):
        assert {ad.step_number().dtype, ad.worker_index().dtype, ad.batch_size().dtype, ad.global_batch().dtype} == {
            jnp.dtype("int32")
        }


def test_a_program_feeds_them_and_a_resize_compiles_nothing():
    def driver(state, batch):
        return state + comm.all_reduce(batch["y"].mean()), numbers(0.0, batch)[1]

    data = {"y": np.zeros(40, np.float32)}
    world = LocalWorld(2)
    with ad.Program(driver, 0.0, data, global_batch=6, shares=(4, 2), world=world, seed=9) as program:
        program.warm_up()
        reports = [program.step()]
        compiled = reports[0].kernels
        program.rescale(global_batch=7, shares=(4, 3))
        reports += [program.step() for _ in range(2)]
    last = reports[-1]
    assert last.batch_sizes == (4, 3)
    assert last.kernels == compiled
    found = {k: np.asarray(v).tolist() for k, v in last.metrics.items()}
    key = jax.random.key_data(jax.random.fold_in(jax.random.key(9), 2)).tolist()
    assert found == {"step": 2, "global_batch": 7, "batch_size": 4, "worker": 1, "workers": 2, "key": key}
    assert int(reports[0].metrics["global_batch"]) == 6


# --- keys -------------------------------------------------------------------------------------------------------------


def test_an_examples_key_depends_on_its_position_in_the_step_alone():
    """On any split, the draws of the examples are those of one whole batch."""

    def driver(state, batch):
        bits = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint8))(ad.example_keys())
        return state, {"sum": comm.all_reduce(bits.astype(jnp.int32).sum(), op="sum")}

    found = []
    for options in ({}, {"shares": (5, 3), "microbatch": 2}, {"shares": (1, 7), "microbatch": 3}):
        data, world = {"y": np.zeros(40, np.float32)}, LocalWorld(2)
        with ad.Program(driver, 0.0, data, global_batch=8, world=world, seed=9, resizable=False, **options) as program:
            found.append([int(program.step().metrics["sum"]) for _ in range(2)])
    step_keys = [jax.random.fold_in(jax.random.key(9), step) for step in range(2)]
    keys = [[jax.random.fold_in(key, place) for place in range(8)] for key in step_keys]
    expected = [sum(int(jax.random.bits(key, dtype=jnp.uint8)) for key in of_step) for of_step in keys]
    assert found == [expected] * 3
