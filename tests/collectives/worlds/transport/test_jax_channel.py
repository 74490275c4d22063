"""Messages between processes of `jax.distributed` that are threads of this one. XLA reduces within one process."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from adaptive import CollectiveError, DisagreementError
from adaptive.base.channel import PartSpec, SentMessage
from collectives.worlds.reducing.sharded import Sharded
from collectives.worlds.transport.jax_channel import JaxChannel
from collectives.worlds.transport.operations import ROOM

from .test_jax_transport import on_processes
from .test_mpi_channel import F32, FLOATS, check, values


def channel_of(transport, specs, status, devices):
    lifetime, members = transport.lifetime, range(len(devices))
    sharded = Sharded(devices, devices)
    world = SimpleNamespace(transport=transport, devices=devices, sharded=sharded, lifetime=lifetime, members=members)
    return JaxChannel(world, [PartSpec(shape, np.dtype(dtype), op) for shape, dtype, op in specs], status)


@pytest.mark.parametrize(
    ("first", "dtype", "status"),
    [(20, F32, 2), (20, np.int32, 3), (ROOM, F32, 0), (ROOM + 1, F32, ROOM), (ROOM + 1, F32, ROOM + 1)],
)
def test_all_devices_receive_the_same_reduced_parts(first, dtype, status):
    specs = [((first,), dtype, "sum"), *FLOATS]

    def work(transport):
        devices = jax.local_devices()[:3]
        channel = channel_of(transport, specs, status, devices)
        for step in range(2):
            rows = [values(specs, step, i) for i in range(len(devices))]
            parts = [[jax.device_put(x, d) for x in row] for row, d in zip(rows, devices, strict=True)]
            own_status = np.arange(1, status + 1).astype(dtype)
            results, arrived = channel.exchange(SentMessage(parts, own_status, "m"))
            assert arrived.dtype == dtype
            np.testing.assert_array_equal(arrived, own_status)
            assert [{x.device for x in row} for row in results] == [{device} for device in devices]
            for result in results:
                check(specs, status, result, rows)
        return True

    assert on_processes(1, work) == [True]


def test_messages_of_other_layouts_are_a_disagreement_and_the_next_one_arrives():
    def work(transport):
        def send(n):
            channel = channel_of(transport, [((n,), F32, "sum")], 0, jax.local_devices()[:1])
            return channel.exchange(SentMessage([[np.ones(n, F32)]], np.zeros(0, F32), "a"))[0][0]

        with pytest.raises(DisagreementError, match=r"rank 1: a: sum float32\[5\]"):
            send(4 + transport.rank)
        found = [np.asarray(x).tolist() for x in send(4)]
        transport.lifetime.closed = True
        with pytest.raises(CollectiveError, match="after it was closed"):
            send(4)
        return found

    assert on_processes(2, work) == [[[2.0] * 4]] * 2


@pytest.mark.parametrize("first", [4, ROOM])
def test_sums_in_the_preamble_are_in_double_precision(first):
    def work(transport):
        channel = channel_of(transport, [((first,), F32, "sum")], 0, jax.local_devices()[:1])
        parts = [[np.full(first, [1e8, 1, -1e8][transport.rank], F32)]]
        return [float(x[0]) for x in channel.exchange(SentMessage(parts, np.zeros(0, F32)))[0][0]]

    assert on_processes(3, work) == [[1.0]] * 3
