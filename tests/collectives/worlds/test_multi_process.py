"""Worlds of MPI processes that are threads of this one: their membership, mailboxes, and ends."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest

import collectives as comm
from adaptive import CollectiveError, DisagreementError, WorkerError
from adaptive.base.channel import SentMessage
from adaptive.base.world import MembersChanged
from collectives.worlds import mpi
from collectives.worlds.launch import OversubscriptionWarning
from collectives.worlds.transport.repair import ENABLED

from .mpi_of_threads import MPI, Comm, Job, MPIError


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """Have this MPI loaded, without fault tolerance, on as many cores as are needed."""
    module = ModuleType("mpi4py.MPI")
    vars(module).update({name: getattr(MPI, name) for name in dir(MPI) if not name.startswith("__")})
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=module, rc=SimpleNamespace()))
    monkeypatch.delenv(ENABLED, raising=False)
    monkeypatch.setattr(mpi, "allowed_cpus", lambda: frozenset())
    return module


def on_processes(size, work, job=None, **options):
    """Return what `work(world)` returns on each process, in its block."""

    def use(alone):
        with comm.MPIWorld(alone, hang_timeout=0, **options) as world:
            return work(world)

    return (job or Job(size)).run(use)


def send(world, value):
    """Return the sum of a value over all workers, and of 1 over all processes."""
    parts = [[jax.device_put(np.full(n, value, np.float32), device) for n in (2, 300)] for device in world.devices]
    (small, large), *_ = (results := world.exchange(SentMessage(parts, np.ones(1, np.float32)), ["sum", "sum"]))[0]
    assert float(small[0]) == float(large[-1])
    return float(small[0]), float(results[1][0])


@pytest.mark.parametrize(("devices", "size"), [(1, 1), (1, 3), (2, 2)])
def test_a_world_knows_its_workers_and_reduces_over_them(devices, size, monkeypatch):
    shared = []
    monkeypatch.setattr(mpi, "share_compilations", lambda: shared.append(True))

    def work(world):
        assert world.library == "An MPI, 1.0"
        assert (world.rank, world.processes, world.capacity) == (own := world.transport.rank, size, size * devices)
        assert [*world.workers] == [*range(devices * own, devices * own + devices)]
        assert world.members == (*range(size * devices),)
        assert (world.size, world.survives, world.spawns) == (size * devices, False, False)
        assert world.all_gather_bytes(b"%d" % own) == [b"%d" % rank for rank in range(size)]
        world.barrier()
        assert world.waited > 0
        assert len(shared) == (size if size > 1 else 0)
        assert send(world, own + 1) == (devices * size * (size + 1) / 2, size)
        return repr(world)

    said = on_processes(size, work, devices=jax.local_devices()[:devices])
    assert not vars(sys.modules["mpi4py"].rc)
    own = "worker 1 on cpu:0" if devices == 1 else "workers 2–3 on cpu:0, cpu:1"
    if size > 1:
        assert said[1] == f"MPIWorld({size * devices} workers; rank 1 of {size}: {own})"
    else:
        assert said == ["MPIWorld(1 worker; rank 0 of 1: worker 0 on cpu:0)"]


def test_a_world_is_closed_after_its_block_and_not_before_all_are_at_its_end():
    worlds = []

    def work(world):
        worlds.append(world)
        with world:
            pass
        world.barrier()  # of the outer block

    on_processes(2, work)
    for world in worlds:
        world.close()  # does nothing
        assert world.transport.comm.freed
        for use in (world.barrier, world.__enter__):
            with pytest.raises(CollectiveError, match="after it was closed"):
                use()

    def leaves(world):
        if world.rank == 1:
            with pytest.raises(DisagreementError, match="rank 0: the end of its world's block"):
                world.barrier()

    with pytest.raises(DisagreementError, match="rank 1: a barrier"):
        on_processes(2, leaves)


@pytest.mark.parametrize(
    ("error", "is_failure"), [(ValueError("bad"), True), (SystemExit(3), True), (SystemExit(0), False)]
)
def test_the_others_hear_that_a_process_has_left_its_block_by_an_error(error, is_failure):
    """A process that exits without one comes to the end with the others."""

    def work(world):
        if world.rank == 1:
            raise error
        if is_failure:
            with pytest.raises(WorkerError, match=f"rank 1 failed in its MPIWorld's block: {type(error).__name__}"):
                world.barrier()
            raise error  # the others do not come to the end of this block

    def use(alone):
        world = comm.MPIWorld(alone, hang_timeout=0)
        try:
            with world:
                work(world)
        except (ValueError, SystemExit) as left:
            assert left is error  # noqa: PT017
        return world.lifetime.closed, world.lifetime.exit_reason

    said = "" if is_failure else "sys.exit()"
    (first, _), second = Job(2).run(use)
    assert (first, second) == (True, (True, said))


@pytest.mark.parametrize("call", range(0, 20, 5))
def test_survivors_continue_with_fewer_workers(call, monkeypatch):
    monkeypatch.setenv(ENABLED, "1")
    on_processes(3, lambda world: None, before := Job(3))
    assert sys.modules["mpi4py"].rc.finalize is False  # which would wait for those that are lost

    def work(world):
        assert world.survives
        found = []
        for step in range(8):
            try:
                found.append(send(world, 10.0 ** world.workers[0]))
            except MembersChanged:
                found.append(None)
            world.all_gather_bytes(b"", f"step {step}")
        return found, world.members, world.unowned_slots, [loss.workers for loss in world.losses], repr(world)

    begins = before.calls[1] - 1  # without the one at the end of the block
    first, second, third = on_processes(3, work, Job(3, dies={1: begins + call}))
    assert second is None
    assert first[:-1] == third[:-1]
    found, members, unowned, losses, said = first
    assert (members, unowned, losses) == ((0, 2), (1,), [(1,)])
    assert said == "MPIWorld(2 workers on 3 slots; rank 0 of 2: worker 0 on cpu:0)"
    assert {*found} <= {(111.0, 3.0), None, (101.0, 2.0)}
    assert found.count(None) <= 1


def test_a_world_has_mailboxes():
    def work(world):
        assert world.why_no_mailbox() == ""
        kept = world.create_mailbox((8,), "a mailbox")
        kept.publish(world.rank, 0, [np.array([1.5])])
        world.barrier()
        found = [kept.look(rank, world.rank, 0)[0].view(float).item() for rank in range(2)]
        another = world.create_mailbox((8,), "another", kept)
        assert another.look(0, world.rank, 0) is None
        assert world._mailboxes == [another]
        return found

    assert on_processes(2, work) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize(("hosts", "warned"), [((0, 0), True), ((0, 1), False)])
def test_one_process_warns_if_those_of_a_host_share_cores(hosts, warned, monkeypatch):
    monkeypatch.setattr(Job, "hosts", hosts)
    monkeypatch.setattr(mpi, "allowed_cpus", lambda: frozenset({0, 1}))
    monkeypatch.setattr(mpi, "chosen_threads", lambda: False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        on_processes(2, lambda world: None)
    assert [w.category for w in seen] == [OversubscriptionWarning] * warned


def test_an_error_of_mpi_while_a_world_is_created_is_one_of_a_worker(monkeypatch):
    for error, kind, says in (
        (MPIError(), WorkerError, r"comm.world\(\) failed: MPI error \(a process is lost\)"),
        (OSError(24, "Too many open files"), OSError, "Too many open files"),
    ):

        def fails(self, kind, error=error):
            raise error

        monkeypatch.setattr(Comm, "Split_type", fails)
        with pytest.raises(kind, match=says):
            on_processes(1, lambda world: None)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_process_lost_while_worlds_are_created_is_lost_for_all_if_others_are_survived(enabled, monkeypatch):
    monkeypatch.setenv(ENABLED, str(int(enabled)))
    monkeypatch.setattr(Comm, "Agree", lambda self, flag: 0)
    if enabled:
        with pytest.raises(WorkerError, match=r"A process was lost during comm.world\(\)"):
            on_processes(1, lambda world: None)
    else:
        on_processes(1, lambda world: None)


@pytest.mark.parametrize(("platform", "numbers"), [("cpu", [0, 0, 0, 0]), ("gpu", [0, 1, 2, 0])])
def test_each_process_of_a_host_has_an_accelerator_of_its_own(platform, numbers, monkeypatch):
    devices = [SimpleNamespace(platform=platform, number=i) for i in range(3)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert [mpi._default_device(rank).number for rank in range(4)] == numbers
