"""Worlds of processes of `jax.distributed` that are threads of this one."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import collectives as comm
from adaptive import CollectiveError, DisagreementError
from collectives.worlds import jax_world
from collectives.worlds.launch import LaunchError, OversubscriptionWarning
from tests.speed import limit

from .transport.test_jax_transport import Tree

UNEVEN = [1, 2, 1]  # devices of each process


@pytest.fixture
def on_processes(monkeypatch):
    """Call `work(world)` in a world's block on three processes. Returns what it returns."""
    own = threading.local()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax_world, "process_tree", lambda: own.tree)
    monkeypatch.setattr(jax_world, "allowed_cpus", lambda: frozenset())

    def run(work, size=3, hang_timeout=lambda rank: 0):
        meeting, given, devices = threading.Barrier(size, timeout=limit(10)), [None] * size, iter(jax.local_devices())
        of_each = [[next(devices) for _ in range(n)] for n in UNEVEN[:size]]

        def process(rank):
            own.tree = Tree(rank, meeting, given)
            with comm.JaxWorld(of_each[rank], hang_timeout=hang_timeout(rank)) as world:
                return work(world)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(process, range(size)))

    return run


def processes_of(world):
    """Return the number of processes, as their status adds up to it."""
    return world.run_on_mesh(lambda status: int(status[0]), np.ones(1, np.float32), "a step")


def test_workers_are_numbered_in_the_order_of_processes(on_processes):
    def work(world):
        assert (world.capacity, world.processes, world.members) == (4, 3, (0, 1, 2, 3))
        assert world.all_gather_bytes(b"%d" % world.rank) == [b"0", b"1", b"2"]
        assert processes_of(world) == 3
        assert world.worker_mesh() is world.sharded
        with comm.JaxWorld(world.devices, hang_timeout=0) as second:
            assert (second.transport.world, world.transport.world) == ("world 2", "world 1")
            assert processes_of(second) == 3
        world.barrier()
        return repr(world)

    assert on_processes(work) == [
        "JaxWorld(4 workers; rank 0 of 3: worker 0 on cpu:0)",
        "JaxWorld(4 workers; rank 1 of 3: workers 1–2 on cpu:1, cpu:2)",
        "JaxWorld(4 workers; rank 2 of 3: worker 3 on cpu:3)",
    ]


@pytest.mark.parametrize("n", [3, 124, 125, 500])
def test_a_program_over_the_mesh_gets_the_status_of_all_processes(on_processes, n):
    def work(world):
        given = (np.arange(n) * (world.rank + 1)).astype(np.int32)
        found = world.run_on_mesh(lambda status: (status.copy(), world.rank), given, "a step")
        assert found[1] == world.rank
        assert found[0].dtype == np.int32
        np.testing.assert_array_equal(found[0], 6 * np.arange(n))
        return True

    assert on_processes(work) == [True] * 3


def test_other_layouts_are_a_disagreement_and_the_next_message_arrives(on_processes):
    def work(world):
        with pytest.raises(DisagreementError, match="rank 1: a step: layout 1"):
            world.run_on_mesh(print, np.zeros(0), "a step", layout=f"layout {world.rank}")
        return processes_of(world)

    assert on_processes(work) == [3] * 3


def test_values_that_workers_publish_are_seen_by_all(on_processes):
    def work(world):
        assert world.why_no_mailbox() == ""
        first = world.create_mailbox((8,), "a mailbox")
        second = world.create_mailbox((8,), "a mailbox", instead_of=first)
        assert world._mailboxes == [second]
        for worker in world.workers:
            second.publish(worker, 0, [np.array([worker + 0.5])])
        world.barrier()
        seen = [float(second.look(worker, world.workers[0], 0)[0].view(float)[0]) for worker in range(4)]
        world.barrier()
        return seen

    assert on_processes(work) == [[0.5, 1.5, 2.5, 3.5]] * 3


def test_a_world_is_closed_by_all_and_once(on_processes):
    worlds = []
    on_processes(worlds.append)
    for world in worlds:
        world.close()
        with pytest.raises(CollectiveError, match="after it was closed"):
            world.barrier()
        assert not world.transport.comm.closed

    def work(world):
        if world.rank == 2:
            with pytest.raises(DisagreementError, match="ranks 0, 1: the end of its world's block"):
                world.barrier()

    with pytest.raises(DisagreementError, match="rank 2: a barrier"):
        on_processes(work)


@pytest.mark.parametrize("chosen", [False, True])
def test_one_process_warns_if_they_share_cores(on_processes, monkeypatch, chosen):
    monkeypatch.setattr(jax_world, "allowed_cpus", lambda: frozenset({0, 1, 2}))
    monkeypatch.setattr(jax_world, "chosen_threads", lambda: chosen)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        on_processes(lambda world: None)
    assert [w.category for w in seen] == [OversubscriptionWarning] * (not chosen)


def test_what_cannot_be_a_world_is_refused(on_processes, monkeypatch):
    with pytest.raises(DisagreementError, match="hang_timeout= is not the same on all ranks"):
        on_processes(lambda world: None, hang_timeout=lambda rank: rank and 50)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="belongs to process 0; this is process 1"):
        on_processes(lambda world: None)
    monkeypatch.undo()
    with pytest.raises(LaunchError, match=r"needs jax.distributed.initialize\(\) before"):
        comm.JaxWorld()
