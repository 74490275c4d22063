"""A worker that joins has the others' replicated state, and initial local state of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import adaptive as ad
import collectives as comm
from adaptive import operators
from adaptive.graph import partition
from adaptive.graph.trace import trace
from adaptive.runtime.placement import Placement
from adaptive.runtime.worker_state import WorkerState, copied
from tests.adaptive.drivers import batch_of

INITIAL = {"key": jax.random.key(7), "own": jnp.arange(3.0), "shared": jnp.zeros((2, 2)), "n": jnp.int32(0)}
PLACES = {name: i for i, name in enumerate(sorted(INITIAL))}  # of leaves


def driver(state, batch):
    def total(label, value):
        operators.operator_state(label, np.full(2, 5.0), lambda old: (old + value, None))

    total("of all", comm.all_reduce(batch["y"].mean()))
    total("of worker", ad.worker_index().astype(float))
    return {**state, "own": state["own"] + ad.worker_index().astype(float), "n": state["n"] + 1}, {}


def held(n=3):
    """Return the state of `n` workers, numbered from 10 on. Each leaf holds another number on each worker."""
    graph = trace(driver, jax.eval_shape(lambda: INITIAL), batch_of(4), capacity=n)
    plan = partition.plan(graph, local_state=[PLACES["own"]])
    return WorkerState(plan, jax.tree.leaves(INITIAL), [Placement(jax.devices()[0])] * n)


def marked(workers, by=100):
    """Let each worker have other numbers in all leaves, which tell it apart."""
    states, op_states = workers.states, workers.op_states
    for i, mark in enumerate(by * (1 + n) for n in range(len(states))):
        states[i] = [
            jax.random.key(mark) if name == "key" else leaf + mark for name, leaf in zip(PLACES, states[i], strict=True)
        ]
        op_states[i] = [[a + mark for a in leaves] for leaves in op_states[i]]
    workers.replace(states, op_states)
    return workers


def numbers(workers, i):
    """Return by how much each leaf of a worker is more than in the beginning; of a key, its number."""
    found = {}
    for name, leaf in zip(PLACES, workers.states[i], strict=True):
        if name == "key":
            found[name] = int(jax.random.key_data(leaf)[1])
        else:
            (found[name],) = np.unique(np.asarray(leaf) - np.asarray(INITIAL[name])).tolist()
    for name, (leaf,) in zip(("of all", "of worker"), workers.op_states[i], strict=True):
        (found[name],) = np.unique(np.asarray(leaf) - 5).tolist()
    return found


BEGUN = {"key": 7, "n": 0, "own": 0, "shared": 0, "of all": 0, "of worker": 0}


def of(worker, *, local=0, by=100):
    mark = by * (1 + worker)
    return {**dict.fromkeys(BEGUN, mark), "own": local, "of worker": local}


def test_all_workers_begin_alike_in_memory_of_their_own():
    given = jax.tree.leaves(INITIAL)
    workers = held()
    assert [numbers(workers, i) for i in range(3)] == [BEGUN] * 3
    leaves = [leaf for state in workers.states for leaf in state if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    places = [leaf.unsafe_buffer_pointer() for leaf in (*leaves, given[PLACES["own"]], given[PLACES["shared"]])]
    assert len(set(places)) == len(places)


def test_a_worker_that_joins_has_what_a_member_has_and_local_state_of_its_own():
    workers = marked(held())
    workers.change_members([1], [])
    assert workers.some_present == 1
    workers.change_members([1, 2], [2])
    assert numbers(workers, 2) == of(1)
    assert numbers(workers, 1) == of(1, local=200)
    assert workers.present == [1, 2]
    workers.change_members([0, 1, 2], [0])
    assert numbers(workers, 0) == of(1)


def test_a_process_in_reserve_has_no_member():
    workers = marked(held())
    workers.change_members([], [])
    assert workers.some_present == 0
    assert numbers(workers, 0) == of(0, local=100)


def test_a_process_that_joins_adopts_what_another_exports():
    giver, taker = marked(held(2)), marked(held(3), by=1000)
    giver.change_members([1], [])
    exported = giver.export()
    assert all(isinstance(array, np.ndarray) and array.flags.c_contiguous for array in exported)
    arrays = taker.receive_buffers()
    assert [(a.shape, a.dtype) for a in arrays] == [(a.shape, a.dtype) for a in exported]
    for buffer, array in zip(arrays, exported, strict=True):
        np.copyto(buffer, array)
    taker.adopt(arrays)
    assert [numbers(taker, i) for i in range(3)] == [of(1)] * 3


def test_a_replicated_operator_state_is_set_on_all_workers():
    workers = marked(held(2))
    workers.change_members([1], [])
    assert workers.op_state(0).tolist() == [205, 205]
    workers.set_op_state(0, np.full(2, 9.0, np.float32))
    assert workers.op_state(0).tolist() == [9, 9]
    assert [numbers(workers, i)["of worker"] for i in range(2)] == [100, 200]
    assert [numbers(workers, i)["of all"] for i in range(2)] == [4, 4]


def test_state_that_something_else_holds_is_fetched_before_it_is_read_and_dropped_if_it_is_replaced():
    class Holder:
        def __init__(self):
            self.fetched = self.dropped = 0

        def give_back(self, values):
            self.fetched += 1
            values[0][workers.places["state", PLACES["n"], 0]] = jnp.int32(41 + self.fetched)

        def forget(self):
            self.dropped += 1

    workers = held(1)
    workers.held_by = holder = Holder()
    assert numbers(workers, 0)["n"] == 42  # of the first look
    workers.replace(workers.states, workers.op_states)
    assert (holder.fetched, holder.dropped) == (4, 1)


def test_a_copy_over_a_mesh_shares_no_memory():
    """A step overwrites it, on each device by itself."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.local_devices(), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shardings = [jax.sharding.NamedSharding(mesh, spec) for spec in (P(), P("a"), P("b", "a"), P(("a", "b")))]
    whole = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for value in (whole, jnp.asarray(whole), *(jax.device_put(whole, sharding) for sharding in shardings)):
        for to in shardings:
            copies = [copied(value, to) for _ in range(2)]
            given = [value] if isinstance(value, jax.Array) else []
            places = [s.data.unsafe_buffer_pointer() for copy in copies for s in copy.addressable_shards]
            assert len(set(places)) == 8
            assert not set(places) & {s.data.unsafe_buffer_pointer() for x in given for s in x.addressable_shards}
            assert [copy.sharding for copy in copies] == [to, to]
            np.testing.assert_array_equal(copies[0], whole)
    keys = jax.random.split(jax.random.key(1), 4)
    np.testing.assert_array_equal(*map(jax.random.key_data, (copied(keys, shardings[1]), keys)))


@pytest.mark.parametrize("joins", [False, True])
def test_a_state_that_is_replaced_in_part_is_said_to_be_lost(monkeypatch, joins):
    workers = held(1)
    states, op_states, exported = workers.states, workers.op_states, workers.export()

    def no_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(workers, "_copied", no_memory)
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            workers.adopt(exported) if joins else workers.replace(states, op_states)
    assert "restore a checkpoint before the next step" in caught.value.__notes__[0]
    workers.replace(states, op_states)
    assert numbers(workers, 0) == numbers(held(1), 0)
