"""What only JaxWorld can get wrong, on two processes that `jax.distributed` joins; see tests/ranks.py."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive.base.channel import SentMessage
from adaptive.base.errors import CollectiveError, DisagreementError, DriverError, WorkerCountError, WorkerError
from collectives.worlds.transport import transport
from tests.problems import build, descend, make_data

pytestmark = [pytest.mark.ranks, pytest.mark.on_ranks(2, jax=True)]


@pytest.fixture(scope="module")
def world():
    """One device of each process."""
    with comm.JaxWorld(jax.local_devices()[:1]) as world:
        assert world.processes > 1
        yield world


def send(world, *values, status=0):
    head = np.zeros(1 + status, np.float32)
    parts = [[jax.device_put(x, device) for x in (head, *values)] for device in world.devices]
    return world.exchange(SentMessage(parts, np.ones(status, np.float32)), ["sum"] * (1 + len(values)))


def test_it_is_picked_with_all_devices_of_all_processes():
    with comm.world() as picked:
        assert isinstance(picked, comm.JaxWorld)
        assert list(picked.devices) == jax.local_devices()
        assert picked.size == 4 * jax.process_count()
        assert repr(picked).startswith(f"JaxWorld({picked.size} workers; rank {jax.process_index()} of ")


def test_a_launcher_with_several_processes_is_recognized(monkeypatch):
    """As of four that mpirun has started two call jax.distributed; where it is all, that is what they want."""
    monkeypatch.setattr("collectives.worlds.mpi.MPIWorld", lambda **options: "MPI's")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(2 * jax.process_count()))
    assert comm.world() == "MPI's"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(jax.process_count()))
    with comm.world() as picked:
        assert isinstance(picked, comm.JaxWorld)


def test_what_cannot_be_a_world_is_refused_and_shared_cores_are_warned_of(world, monkeypatch):
    with pytest.raises(DisagreementError, match="hang_timeout= is not the same on all ranks"):
        comm.JaxWorld(jax.local_devices()[:1], hang_timeout=50 * world.rank)
    other = next(device for device in jax.devices() if device.process_index != jax.process_index())
    with pytest.raises(
        ValueError, match=rf"are of process {other.process_index}: .* of process {world.rank} per worker"
    ):
        comm.JaxWorld([other])
    world.barrier()
    monkeypatch.setattr("collectives.worlds.jax_world.allowed_cpus", lambda: frozenset({0, 1}))
    monkeypatch.setattr("collectives.worlds.jax_world.chosen_threads", lambda: False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        comm.JaxWorld(jax.local_devices()[:1]).close()
    assert [w.category for w in seen] == [comm.OversubscriptionWarning] * (world.rank == 0)


@pytest.mark.parametrize("n", [3, 125])  # within the preamble, and in a sum of its own
def test_a_program_over_the_mesh_gets_the_status_of_all_processes(world, n):
    given = (np.arange(n) * (world.rank + 1)).astype(np.int32)
    found = world.run_on_mesh(lambda status: status.copy(), given, "a step")
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.arange(n) * world.processes * (world.processes + 1) // 2)


@pytest.mark.parametrize(
    "option",
    [{"max_workers": 100}, {"respawn": True}, {"lost": "continue"}, {"workers": 1}, {"min_workers": 100}],
    ids=str,
)
def test_options_of_elastic_worlds_are_refused(option):
    with pytest.raises(WorkerCountError, match=f"^{next(iter(option))}="):
        comm.world(**option)
    with comm.world(workers=4 * jax.process_count(), lost="stop"):
        pass


def test_a_mesh_over_devices_of_another_process_is_refused():
    kinds = (jax.sharding.AxisType.Auto,)
    over_all = jax.make_mesh((len(jax.devices()),), ("fsdp",), devices=jax.devices(), axis_types=kinds)
    own = jax.make_mesh((4,), ("fsdp",), devices=jax.local_devices(), axis_types=kinds)
    with pytest.raises(CollectiveError, match=r"mesh= is not available under jax\.distributed"):
        comm.world(mesh=own)
    with pytest.raises(CollectiveError, match=r"has devices of other processes(?s:.*)devices=jax.local_devices\(\)"):
        comm.SoloWorld(mesh=over_all)
    spread = jax.sharding.NamedSharding(over_all, jax.sharding.PartitionSpec("fsdp"))
    state = {"w": jax.make_array_from_callback((8,), spread, lambda index: np.zeros(8)[index])}
    with (
        comm.SoloWorld(mesh=own) as alone,
        pytest.raises(DriverError, match=r"state\['w'\] is sharded over devices of another process(?s:.*)device_put"),
    ):
        build(descend, state, make_data(), 8, world=alone)


def test_sums_overflow_and_keep_nans_as_elsewhere(world):
    most = np.finfo(np.float32).max
    x = np.resize(np.array([most, -most, np.nan, 1.0], np.float32), 400)
    results, _ = world.exchange(
        SentMessage([[jax.device_put(x, d)] for d in world.devices], np.zeros(0, np.float32)), ["sum"]
    )
    np.testing.assert_array_equal(results[0][0][:4], np.array([np.inf, -np.inf, np.nan, world.size], np.float32))


def test_a_layout_is_compiled_once_and_before_the_frame(world, monkeypatch):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        announce = transport.announce
        monkeypatch.setattr(transport, "announce", lambda *header: (compiled.append("frame"), announce(*header)))
        for _ in range(2):
            send(world, jnp.ones((7, 11)))
    finally:
        jax.monitoring.clear_event_listeners()
    backend = [name.rpartition("/")[2] for name in compiled if "backend_compile" in name or name == "frame"]
    assert backend[-3:] == ["backend_compile_duration", "frame", "frame"]


def test_processes_in_different_worlds_raise(world):
    with comm.JaxWorld(jax.local_devices()[:1]) as other:
        with pytest.raises(DisagreementError, match=r"a barrier, in world \d+ \("):
            (other if world.rank else world).barrier()
        for each in (world, other):
            each.barrier()


def test_a_process_that_builds_a_world_alone_raises(world):
    with pytest.raises(DisagreementError, match=r"making world \d+ of"):
        world.barrier() if world.rank == 0 else comm.JaxWorld(jax.local_devices()[:1])
    with comm.JaxWorld(jax.local_devices()[:1]) as other:  # all count alike
        other.barrier()
    world.barrier()


def test_a_reduction_that_cannot_be_compiled_fails_before_the_frame(world):
    """So that the others raise instead of waiting in a collective."""

    def send_odd():
        if world.rank == 0:
            world.exchange(SentMessage([[jnp.zeros(1), jnp.zeros(3)]], np.zeros(0, np.float32)), ["sum", "no such op"])
        else:
            world.barrier()

    if world.rank == 0:
        with pytest.raises(KeyError, match="no such op"):
            send_odd()
        world.fail("it has no such op")
    else:
        with pytest.raises(WorkerError, match="rank 0 failed it has no such op"):
            send_odd()


def test_a_checkpoint_is_written_and_read(world, tmp_path_factory):
    folder = world.all_gather_bytes(str(tmp_path_factory.mktemp("kept")).encode())[0].decode()
    with build(descend, 0.0, make_data(), 8, world=world) as program:
        list(program.run(steps=4, checkpoint=ad.Checkpoints(folder, every="2 steps")))
        state = float(program.state)
    with build(descend, 0.0, make_data(), 8, world=world) as program:
        program.restore(folder)
        assert (program.steps, float(program.state)) == (4, state)


def test_pairs_that_do_not_wait(world):
    """Each worker comes to be where the others are, by looking alone."""

    def driver(w, batch):
        def local_step(w, _):
            return comm.asynchronous_mean(w), None

        start = jnp.full(3, ad.worker_index().astype(jnp.float32))
        last, _ = jax.lax.scan(local_step, start, ad.minibatches(batch, size=1))
        return w + 0 * comm.all_reduce(last).mean(), {"last": comm.all_gather(last[0])}

    n = 40 * world.size
    with ad.Program(driver, jnp.zeros(3), jnp.zeros(n), global_batch=n, world=world) as program:
        moved = False
        for _ in range(50):
            last = np.asarray(program.step().metrics["last"])
            assert (last >= 0).all()
            assert (last <= world.size - 1).all()
            # In a step, one worker may take all its local steps before the other one begins.
            moved |= bool((last != np.arange(world.size)).any())
        assert moved
