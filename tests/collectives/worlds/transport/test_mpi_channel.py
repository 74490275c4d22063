"""Messages between MPI processes that are threads of this one."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from adaptive import DisagreementError, WorkerError
from adaptive.base.channel import PartSpec, SentMessage
from adaptive.base.reductions import Mixed
from collectives.worlds.devices import DeviceWorld
from collectives.worlds.transport import mpi_transport
from collectives.worlds.transport.mpi_channel import MPIChannel
from collectives.worlds.transport.operations import ROOM
from tests.collectives.worlds.mpi_of_threads import Job, transport_of

F32 = np.dtype(np.float32)
FLOATS = [((200,), F32, "sum"), ((3, 50), F32, "sum"), ((40,), F32, "max"), ((7,), F32, "min"), ((9,), np.int32, "max")]


class Pairs(Mixed):
    """Every worker averages with the next one."""

    def weights(self, step, members):
        return {worker: {worker: 0.25, (worker + 1) % len(members): 0.75} for worker in members}


def channel_of(comm, specs, status, *, hosts=None, devices=None, workers=None, survives=True):
    """Return the channel of a process, and its transport."""
    devices = devices or jax.local_devices()[:1]
    transport = transport_of(comm, hosts, survives=survives)
    workers = workers or range(comm.rank, comm.rank + 1)
    world = SimpleNamespace(devices=devices, local_mesh=None, workers=workers, members=range(comm.size))
    layout = [PartSpec(shape, np.dtype(dtype), op) for shape, dtype, op in specs]
    local = DeviceWorld(devices)
    return MPIChannel(world, transport, local.channel, layout, status, "a channel"), transport


def values(specs, process, device=0):
    rng = np.random.default_rng([process, device])
    return [(100 * rng.normal(size=shape)).astype(dtype) for shape, dtype, _ in specs]


def expected(specs, rows):
    found = []
    for j, (_, dtype, op) in enumerate(specs):
        column = [row[j] for row in rows]
        found.append(sum(x.astype(np.float64) for x in column) if op == "sum" else getattr(np, op)(column, axis=0))
        found[-1] = found[-1].astype(dtype)
    return found


def check(specs, status, got, rows):
    for j, (x, wanted) in enumerate(zip(got, expected(specs, rows), strict=True)):
        assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)
        n = len(x) - status * (j == 0)
        np.testing.assert_allclose(np.asarray(x)[:n], wanted[:n], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("first", "dtype", "status", "kinds"),
    [
        (20, F32, 2, "one"),
        (20, np.int32, 3, "several"),
        (ROOM, F32, 0, "one"),  # all in the preamble
        (ROOM + 1, F32, ROOM, "another"),  # only the status
        (300, F32, ROOM + 1, "both"),  # neither
        (300, F32, ROOM + 1, "several"),
        (300, np.int32, 0, "one"),
    ],
)
def test_all_receive_the_same_reduced_parts(first, dtype, status, kinds, monkeypatch):
    """Processes may have several devices, and others than JAX's default."""
    monkeypatch.setattr(mpi_transport, "PIECE_BYTES", 256)
    specs = [((first,), dtype, "sum"), *FLOATS]
    here = jax.local_devices()

    def use(comm):
        own = {"one": here[:1], "another": here[1:2], "several": here[: 1 + comm.rank]}
        devices = own["another" if kinds == "both" and comm.rank else "one" if kinds == "both" else kinds]
        channel, transport = channel_of(comm, specs, status, devices=devices)
        for step in range(2):
            rows = [values(specs, 2 * comm.rank + step, i) for i in range(len(devices))]
            parts = [[jax.device_put(x, d) for x in row] for row, d in zip(rows, devices, strict=True)]
            own_status = np.arange(1, status + 1).astype(dtype) * (comm.rank + 1)
            results, arrived = channel.exchange(SentMessage(parts, own_status, f"step {step}"))
            assert arrived.dtype == dtype
            np.testing.assert_array_equal(arrived, 3 * np.arange(1, status + 1))
            assert [{x.device for x in row} for row in results] == [{device} for device in devices]
            everyone = [
                values(specs, 2 * rank + step, i)
                for rank in range(2)
                for i in range(1 + rank if kinds == "several" else 1)
            ]
            for row in results:
                check(specs, status, row, everyone)
            assert (transport.activity.begun, transport.completed) == (step + 1, step + 1)
            assert not transport.lock.locked()
            last = [np.asarray(x)[: first - status if j == 0 else None].tobytes() for j, x in enumerate(results[0])]
        return last

    found = Job(2).run(use)
    assert found[0] == found[1]


@pytest.mark.parametrize("device", [0, 1])
def test_sums_in_the_preamble_are_rounded_like_others(device):
    most = np.finfo(F32).max

    def use(comm):
        channel, _ = channel_of(comm, [((5,), F32, "sum")], 1, devices=jax.local_devices()[device:][:1])
        seen = []
        for x in ([most, -most, np.nan, 1, 9], [most / 2, -most / 2, 3, 2, 9]):
            with np.errstate(all="raise"):
                (row,), status = channel.exchange(SentMessage([[np.array(x, F32)]], np.ones(1, F32)))
            seen.append([*np.asarray(row[0])[:4].tolist(), *status.tolist()])
        return seen

    for found in Job(2).run(use):
        np.testing.assert_array_equal(found, [[np.inf, -np.inf, np.nan, 2, 2], [most, -most, 6, 4, 2]])


@pytest.mark.parametrize("device", [0, 1])
def test_messages_of_other_layouts_or_words_are_a_disagreement_and_the_next_ones_arrive(device):
    def use(comm):
        channel, transport = channel_of(
            comm, [((4,), F32, "sum"), ((5 + comm.rank,), F32, "sum")], 0, devices=jax.local_devices()[device:][:1]
        )
        other = MPIChannel(channel._world, transport, None, [PartSpec((3,), F32, "sum")], 0, "another")

        def send(channel, *sizes, about="a"):
            return channel.exchange(SentMessage([[np.ones(n, F32) for n in sizes]], np.zeros(0, F32), about))

        with pytest.raises(DisagreementError, match=r"rank 1: a: sum float32\[4\], sum float32\[6\]"):
            send(channel, 4, 5 + comm.rank)
        assert not transport.lifetime.closed
        with pytest.raises(DisagreementError, match="rank 1: number 1"):
            send(other, 3, about=f"number {comm.rank}")
        return np.asarray(send(other, 3)[0][0][0]).tolist(), transport.torn, transport.inside

    assert Job(2).run(use) == [([2.0] * 3, False, False)] * 2


@pytest.mark.parametrize("device", [0, 1])
def test_after_an_error_in_a_message_or_the_end_of_the_world_nothing_is_sent(device):
    def use(comm):
        made = channel_of(comm, [((200,), F32, "sum")], 0, devices=jax.local_devices()[device:][:1], survives=False)
        channel, transport = made

        def send():
            return channel.exchange(SentMessage([[np.ones(200, F32)]], np.zeros(0, F32), "a"))

        send()
        sums, allreduce = [], transport.comm.Allreduce

        def fail(*arguments):
            sums.append(1 / len(sums))  # the preamble has passed, and the part's sum fails
            allreduce(*arguments)

        transport.comm.Allreduce = fail
        with pytest.raises(ZeroDivisionError):
            send()
        transport.comm.Allreduce = allreduce
        assert transport.torn
        with pytest.raises(WorkerError, match="left a collective by an error"):
            send()
        transport.torn, transport.lifetime.closed = False, True
        with pytest.raises(Exception, match="after it was closed"):
            send()
        return transport.activity.begun, transport.lock.locked()

    assert Job(1).run(use) == [(2, False)]


@pytest.mark.parametrize("uneven", [False, True])
def test_custom_reductions_are_of_all_workers(uneven):
    """Every worker's own mean. One process may have two of three workers."""
    slots = [range(2), range(2, 3)] if uneven else [range(i, i + 1) for i in range(3)]
    specs = [((4,), F32, "sum"), ((6,), F32, Pairs()), ((2,), F32, "max")]
    mixed = np.float32([[1, 2, 3, 4, 5, 6]] * 3) * np.float32([[1], [10], [100]])

    def use(comm):
        own, devices = slots[comm.rank], jax.local_devices()[1:]
        channel, transport = channel_of(comm, specs, 1, devices=devices[: len(own)], workers=own)
        everyone = [p._replace(worker_slots=s) for p, s in zip(transport.group.everyone, slots, strict=True)]
        object.__setattr__(transport.group, "everyone", tuple(everyone))
        channel._world.members = range(3)
        parts = []
        for worker, device in zip(own, devices, strict=False):
            sent = np.ones(4, F32), mixed[worker], np.float32([worker, -worker])
            parts.append([jax.device_put(x, device) for x in sent])
        results, status = channel.exchange(SentMessage(parts, np.ones(1, F32), step=1))
        for worker, device, row in zip(own, devices, results, strict=False):
            summed, mean, largest = map(np.asarray, row)
            assert {x.device for x in row} == {device}
            np.testing.assert_array_equal(summed[:3], [3] * 3)
            np.testing.assert_allclose(mean, 0.25 * mixed[worker] + 0.75 * mixed[(worker + 1) % 3])
            np.testing.assert_array_equal(largest, [2, 0])
        return status.tolist(), transport.last.agreed

    assert Job(len(slots)).run(use) == [([float(len(slots))], True)] * len(slots)
