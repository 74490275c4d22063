"""Messages between processes of `jax.distributed` that are threads of this one: in shared memory, or by XLA."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from adaptive import CollectiveError, DisagreementError
from adaptive.base.channel import PartSpec
from adaptive.base.reductions import Sliced
from collectives.worlds.reducing import shared_memory
from collectives.worlds.reducing.sharded import Sharded
from collectives.worlds.reducing.shared_memory import SharedMemorySum
from collectives.worlds.transport.jax_channel import JaxChannel
from collectives.worlds.transport.preamble import NUMBERS

from .test_jax_transport import on_processes
from .test_mpi_channel import F32, FLOATS, check, values

COVERS = ("collectives/worlds/reducing/shared_memory.py",)

ROOM = NUMBERS - 4


@pytest.fixture
def small_rows(monkeypatch):
    """Let a process write few bytes at a time."""
    monkeypatch.setattr(shared_memory, "ROW", 512)
    shared_memory._loads.cache_clear()
    yield
    shared_memory._loads.cache_clear()


def channel_of(transport, specs, status, devices, memory=None):
    tree = transport.tree
    shares = None if memory is None else SharedMemorySum(memory, tree.rank, lambda: tree.sum(np.zeros(1)))
    sharded = Sharded(devices, devices) if memory is None else None
    lifetime, members = transport.lifetime, range(len(devices))
    world = SimpleNamespace(
        transport=transport, devices=devices, shared_memory=shares, sharded=sharded, lifetime=lifetime, members=members
    )
    return JaxChannel(world, [PartSpec(shape, np.dtype(dtype), op) for shape, dtype, op in specs], status)


@pytest.mark.parametrize(
    ("first", "dtype", "status"),
    [(20, F32, 2), (20, np.int32, 3), (ROOM, F32, 0), (ROOM + 1, F32, ROOM), (ROOM + 1, F32, ROOM + 1)],
)
@pytest.mark.parametrize("processes", [2, 3, 1])
@pytest.mark.usefixtures("small_rows")
def test_all_receive_the_same_reduced_parts(first, dtype, status, processes):
    """In shared memory, which is filled several times, or by XLA if there is one process."""
    specs = [((first,), dtype, "sum"), *FLOATS[: None if processes > 1 else 1]]
    memory = np.zeros((processes + 1, 512), np.uint8) if processes > 1 else None

    def work(transport):
        devices = jax.local_devices()[: 3 if processes == 1 else 1 + transport.rank]
        channel = channel_of(transport, specs, status, devices, memory)
        for step in range(2):
            rows = [values(specs, 5 * transport.rank + step, i) for i in range(len(devices))]
            parts = [[jax.device_put(x, d) for x in row] for row, d in zip(rows, devices, strict=True)]
            own_status = (transport.rank + 1) * np.arange(1, status + 1).astype(dtype)
            results, arrived = channel.exchange(parts, own_status, "m")
            assert arrived.dtype == dtype
            np.testing.assert_array_equal(arrived, sum(range(processes + 1)) * np.arange(1, status + 1))
            assert [{x.device for x in row} for row in results] == [{device} for device in devices]
            everyone = [
                values(specs, 5 * rank + step, i)
                for rank in range(processes)
                for i in range(3 if processes == 1 else 1 + rank)
            ]
            for result in results:
                check(specs, status, result, everyone)
        return [np.asarray(x)[: first - status if j == 0 else None].tobytes() for j, x in enumerate(results[-1])]

    found = on_processes(processes, work)
    assert found == [found[0]] * processes


def test_messages_of_other_layouts_are_a_disagreement_and_the_next_one_arrives():
    memory = np.zeros((3, 1 << 16), np.uint8)

    def work(transport):
        def send(*sizes):
            channel = channel_of(transport, [((n,), F32, "sum") for n in sizes], 0, jax.local_devices()[:1], memory)
            return channel.exchange([[np.ones(n, F32) for n in sizes]], np.zeros(0, F32), "a")[0][0]

        with pytest.raises(DisagreementError, match=r"rank 1: a: sum float32\[4\], sum float32\[6\]"):
            send(4, 5 + transport.rank)
        found = [np.asarray(x).tolist() for x in send(4, 5)]
        transport.lifetime.closed = True
        with pytest.raises(CollectiveError, match="after it was closed"):
            send(4, 5)
        return found

    assert on_processes(2, work) == [[[2.0] * 4, [2.0] * 5]] * 2


def test_sums_in_shared_memory_overflow_without_a_warning():
    memory, most = np.zeros((3, 1 << 12), np.uint8), np.finfo(F32).max

    def work(transport):
        channel = channel_of(transport, [((1,), F32, "sum"), ((3,), F32, "sum")], 0, jax.local_devices()[:2], memory)
        with np.errstate(all="raise"):
            parts = [[np.zeros(1, F32), np.array([most, np.inf, -np.inf], F32)] for _ in range(2)]
            return np.asarray(channel.exchange(parts, np.zeros(0, F32))[0][1][1]).tolist()

    assert on_processes(2, work) == [[np.inf, np.inf, -np.inf]] * 2


@pytest.mark.parametrize(("first", "total"), [(4, 1.0), (ROOM, 1.0), (ROOM + 1, 0.0)])
def test_sums_in_the_preamble_are_in_double_precision(first, total):
    memory = np.zeros((4, 1 << 12), np.uint8)

    def work(transport):
        specs = [((first,), F32, "sum"), ((200,), F32, "sum")]
        channel = channel_of(transport, specs, 0, jax.local_devices()[:1], memory)
        parts = [[np.full(n, [1e8, 1, -1e8][transport.rank], F32) for n in (first, 200)]]
        return [float(x[0]) for x in channel.exchange(parts, np.zeros(0, F32))[0][0]]

    assert on_processes(3, work) == [[total, 0.0]] * 3


@pytest.mark.parametrize(
    ("dtype", "op", "fits"),
    [
        *((dtype, "sum", True) for dtype in ("int8", "uint32", "float32", "complex64")),
        ("bfloat16", "sum", False),
        ("bool", "max", False),
        ("float32", Sliced(), False),
    ],
)
def test_what_numpy_reduces_as_xla_does_is_reduced_in_shared_memory(dtype, op, fits):
    made = SharedMemorySum(np.zeros((3, 100), np.uint8), 0, threading.Lock)
    layout = PartSpec((2,), F32, "sum"), PartSpec((2,), jax.numpy.dtype(dtype), op)
    assert (made.buffers(layout) is not None) is fits
