"""Sources, operator states and hooks: what may be given to them, and what JAX's transformations make of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.base.world import World
from adaptive.operators.context import trace_as, tracing
from adaptive.operators.operator_state import Frozen
from adaptive.operators.sources import OFFSET, SEED, Reading, Source, read
from adaptive.runtime.local_world import LocalWorld
from adaptive.runtime.segment import Feed

from .drivers import Recorder, planned, pointed_at, traced

READING = Reading(3, 7, 1, 16, 6, 6, 1, 5, 0.1, 0.2, np.ones(2, bool))


def count(label="count", init=None, update=lambda n: (n + 1, n)):
    return operators.operator_state(label, np.zeros(()) if init is None else init, update)


# --- operator states --------------------------------------------------------------------------------------------------


def test_a_op_state_may_hold_any_pytree():
    init = {"mean": np.zeros((2, 3)), "n": 0, "pair": (np.float32(1), [True])}

    def driver(state, batch):
        count("tree", init, lambda old: (jax.tree.map(lambda x: x, old), None))
        return state, {}

    (op_state,) = planned(driver, 0.0).op_states
    assert [(a.shape, str(a.dtype)) for a in op_state.init] == [
        ((2, 3), "float32"),
        ((), "int32"),
        ((), "float32"),
        ((), "bool"),
    ]


def test_a_op_state_keeps_its_dtypes_whatever_is_computed():
    def driver(state, batch):
        count("n", np.zeros((), np.float16), lambda n: (n.astype(float) * 2, n))
        return state, {}

    (op_state,) = planned(driver, 0.0).op_states
    assert [a.aval.dtype for a in op_state.new] == [jnp.float16]


def test_op_states_of_one_label_are_numbered_in_the_drivers_order():
    def driver(state, batch):
        for label in ("a", "b", "a"):
            count(label)
        return state, {}

    assert [s.name for s in planned(driver, 0.0).op_states] == ["a/0", "b/0", "a/1"]


def test_a_op_state_in_a_jitted_helper_that_is_called_twice_is_two():
    helper = jax.jit(lambda x: x + count())

    def driver(state, batch):
        return state, {"a": helper(state), "b": helper(state)}

    assert [s.name for s in planned(driver, 0.0).op_states] == ["count/0", "count/1"]


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda x: count(init=x), "initial state must be known before the first step"),
        (lambda x: count(update=lambda n: ((n, n), n)), "a state shaped like its initial one"),
        (lambda x: count(update=lambda n: (jnp.zeros(3), n)), "a state shaped like its initial one"),
        (lambda x: jax.vmap(lambda y: count(update=lambda n: (n + y, n)))(x), "mapped by jax.vmap"),
    ],
)
def test_a_op_state_that_cannot_be_is_refused_with_its_line(call, wrong):
    def driver(state, batch):
        call(batch["y"])
        return state, {}

    with pytest.raises(ad.CollectiveError, match=wrong) as error:
        traced(driver, 0.0)
    assert pointed_at(error.value)


def test_initial_states_are_compared_by_content():
    a, b = Frozen([np.zeros(3), 1]), Frozen([np.zeros(3, np.float32), 1])
    assert a == b
    assert hash(a) == hash(b)
    assert a != Frozen([np.ones(3), 1])
    assert a != Frozen([np.zeros(3), 1.0])
    assert repr(a) == "Frozen(float32[3], int32[])"


# --- hooks ------------------------------------------------------------------------------------------------------------


def test_a_hook_takes_numbers_arrays_and_trees():
    def driver(state, batch):
        operators.hook("h", Recorder(), (1, 2.0, np.zeros(2), {"a": [state]}))
        return state, {}

    (hook,) = planned(driver, 0.0).hooks
    assert [a.aval.shape for a in hook.values] == [(), (), (2,), ()]


def test_a_mapped_hook_is_refused():
    def driver(state, batch):
        jax.vmap(lambda y: operators.hook("h", Recorder(), (y,)))(batch["y"])
        return state, {}

    with pytest.raises(ad.CollectiveError, match=r"mapped by jax\.vmap"):
        traced(driver, 0.0)


# --- collectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes_have_no_derivative(op):
    with pytest.raises(ad.CollectiveError, match=f"op='{op}'"):
        traced(lambda s, b: (s + jax.grad(lambda w: comm.all_reduce(w * b["y"].mean(), op=op))(s), {}), 0.0)


def test_a_moving_weight_has_no_derivative():
    with pytest.raises(ad.CollectiveError, match="with respect to its weight"):
        traced(lambda s, b: (s + jax.grad(lambda w: comm.all_reduce(b["y"].mean(), weight=w))(s), {}), 0.0)


def test_a_mapped_weight_is_refused():
    def driver(state, batch):
        return state + jax.vmap(lambda y: comm.all_reduce(y, weight=y))(batch["y"]).sum(), {}

    with pytest.raises(ad.CollectiveError, match="one scalar per worker, not mapped"):
        traced(driver, 0.0)


# --- sources and the trace in progress --------------------------------------------------------------------------------


def test_a_trace_is_known_while_it_lasts():
    assert tracing() is None
    with trace_as(3, 8) as outer:
        assert tracing() is outer
        with trace_as(2, 4):
            assert (tracing().capacity, tracing().examples) == (2, 4)
        assert (tracing().capacity, tracing().examples) == (3, 8)
    assert tracing() is None


def test_sources_reach_the_segments_in_two_vectors():
    speed = Source("speed", lambda r: 1.5 * r.compute_seconds)
    rank = Source("rank", lambda r: r.worker + 10, np.int32)

    def driver(state, batch):
        found = {"speed": comm.all_reduce(read(speed)), "rank": comm.all_reduce(read(rank), op="max")}
        return state + ad.step().astype(float) + 0 * comm.all_reduce(read(OFFSET).astype(float)), found

    feed = Feed.of(planned(driver, 0.0))
    floats, ints = feed.measure(READING)
    assert (floats.dtype, ints.dtype) == (np.float32, np.int32)
    values = {k: float(v) for k, v in feed.values(floats, ints).items()}
    assert values == {
        "speed": pytest.approx(0.15),
        "examples": 6,
        "worker": 1,
        "rank": 11,
        "step": 3,
        "offset": 5,
    }
    later = READING._replace(worker=5, compute_seconds=9.0)
    floats, ints = feed.for_microbatch((floats, ints), later, 4, 2)
    assert floats[0] == 0
    values = {k: float(v) for k, v in feed.values(floats, ints).items()}
    assert (values["examples"], values["offset"]) == (2, 9)  # read again for every call
    assert (values["rank"], values["speed"]) == (11, pytest.approx(0.15))  # measured once


def test_any_seed_fits_a_source():
    for seed in (0, 2**31, 2**40 + 3, -1):
        value = SEED.read(READING._replace(seed=seed))
        assert np.int32(value) == value


# --- a world for tests ------------------------------------------------------------------------------------------------


def test_the_stand_in_for_a_cluster_is_a_world():
    world = LocalWorld(3)
    assert isinstance(world, World)
    assert (world.size, world.rank, world.processes, world.workers) == (3, 0, 1, range(3))
    assert len(world.devices) == 3
    assert world.all_gather_bytes(b"x") == [b"x"]
    assert world.barrier() is None
    parts = [[jnp.array([1.0 + w, 0.0]), jnp.array(w), jnp.array(-w)] for w in range(3)]
    results, status = world.exchange(parts, ["sum", "max", "min"], np.array([7.0]))
    assert [[np.asarray(x).tolist() for x in row] for row in results] == [[[6.0, 0.0], 2, -2]] * 3
    assert status.tolist() == [7.0]
