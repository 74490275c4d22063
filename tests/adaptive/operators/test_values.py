"""What a driver may ask: numbers of the step that cost no recompile, and keys that belong to examples."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adaptive as ad
import collectives as comm
from adaptive.operators.sources import Reading
from adaptive.runtime.local_world import LocalWorld
from adaptive.runtime.message import lay_out_all
from adaptive.runtime.segment import FLOATS, INTS, START, Feed, segment_function
from tests.adaptive.drivers import batch_of, planned, traced


def reading(**given):
    base = Reading(3, 7, 1, 16, 6, 6, 1, 5, 0.1, 0.2, np.ones(2, bool))
    return base._replace(**given)


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


def call_of(examples):
    """The keys that one call of so many examples sees, as a function of what is fed to it."""

    def driver(state, batch):
        bits = jax.random.key_data(ad.example_keys())
        return state, {"bits": comm.all_reduce(bits.astype(jnp.uint32), op="max"), "step": ad.step_number()}

    plan = planned(driver, 0.0, examples)
    return Feed.of(plan), plan


def keys_in(examples, reading):
    feed, plan = call_of(examples)
    segment = plan.microbatches[0]
    (sent,) = plan.messages[0]
    floats, ints = feed.measure(reading)
    layouts = lay_out_all(plan.messages, capacity=plan.graph.capacity, status=0)
    call = segment_function(plan, replace(segment, outputs=(sent.value,)), feed, layouts)
    consts = list(plan.graph.consts.values())
    given = {
        FLOATS: floats,
        INTS: ints,
        START: np.int32(0),
        **{("const", i, 0): consts[i] for i in segment.reads("const")},
    }
    return np.asarray(call.run(*map(given.get, call.arguments))[0])


SIZES = [1, 2, 3, 4, 8]
WHOLE = 8


@settings(max_examples=6)
@given(st.lists(st.sampled_from(SIZES[:4]), min_size=2, max_size=6), st.integers(0, 3), st.sampled_from([0, 5, 2**40]))
def test_an_examples_key_does_not_depend_on_the_split(microbatches, step, seed):
    """Microbatches, of whichever worker, that follow one another see the keys of one whole batch."""
    whole = keys_in(WHOLE, reading(step=step, seed=seed, offset=0, worker=0))
    found, offset = [], 0
    for number, size in enumerate(microbatches):
        if offset + size > WHOLE:
            break
        found.append(keys_in(size, reading(step=step, seed=seed, offset=offset, worker=number % 3)))
        offset += size
    assert np.array_equal(np.concatenate(found), whole[:offset])
    assert len(np.unique(whole, axis=0)) == WHOLE


def test_keys_are_folded_by_step_and_position():
    key = jax.random.fold_in(jax.random.key(7), 3)
    want = [jax.random.key_data(jax.random.fold_in(key, place)) for place in (5, 6)]
    assert np.array_equal(keys_in(2, reading()), want)


def test_the_batch_may_be_given_to_example_keys_in_a_program_too():
    def driver(state, batch):
        assert ad.example_keys(batch["x"]).shape == ad.example_keys(batch).shape == ad.example_keys().shape == (4,)
        return state, {}

    traced(driver, 0.0, 4)
    assert batch_of(4)["x"].shape[0] == 4
