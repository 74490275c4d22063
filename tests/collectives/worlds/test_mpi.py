"""What only MPI can get wrong, on two ranks of an mpirun; see tests/ranks.py."""

from __future__ import annotations

import sys
from functools import partial

import jax
import numpy as np
import pytest

import collectives as comm
from adaptive.base.channel import PartSpec, SentMessage
from collectives.worlds.transport.mpi_transport import PIECE_BYTES

pytestmark = [pytest.mark.ranks, pytest.mark.on_ranks(2)]


@pytest.fixture(scope="module")
def world():
    """A device for each rank."""
    with comm.MPIWorld() as world:
        yield world


def send(world, *values, status=0):
    head = np.zeros(1 + status, np.float32)
    parts = [[jax.device_put(x, device) for x in (head, *values)] for device in world.devices]
    return world.exchange(SentMessage(parts, np.zeros(status, np.float32)), ["sum"] * (1 + len(values)))


def test_it_keeps_to_the_communicator_it_was_given(world):
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(color=world.rank % 2, key=-world.rank)  # in reverse order
    errors = half.Get_errhandler()
    with comm.MPIWorld(half) as part:
        assert part.processes == half.size
        assert part.rank == half.rank
        ranks = [int(rank) for rank in part.all_gather_bytes(b"%d" % world.rank)]
        assert ranks == sorted(ranks, reverse=True)
        assert {rank % 2 for rank in ranks} == {world.rank % 2}
        total = float(comm.all_reduce(1.0, op="sum"))
        assert total == part.size
    assert half.Get_errhandler() == errors
    assert half.allreduce(1) == half.size  # only the duplicate was freed
    half.Free()


def test_on_the_first_cpu_results_are_the_buffers_that_mpi_wrote(world):
    x = np.ones((400, 500), np.float32)  # several pieces
    assert x.nbytes > PIECE_BYTES
    addresses = []
    for _ in range(4):
        results, _ = send(world, x)
        addresses.append([part.unsafe_buffer_pointer() for part in results[0]])
    assert addresses == [addresses[0]] * 4  # one set of them
    assert all(address % 64 == 0 for address in addresses[0])


# --- the frame --------------------------------------------------------------------------------------------------------


class Counting:
    """A communicator that takes down the bytes of each Allreduce."""

    def __init__(self, comm):
        self.comm, self.nbytes = comm, []

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Allreduce(self, sent, received, *op):
        self.nbytes.append(received.nbytes)
        self.comm.Allreduce(sent, received, *op)


@pytest.mark.parametrize(
    ("floats", "allreduces"),
    [(20, [1024]), (123, [1024]), (124, [1024]), (125, [1024, 500]), (200_000, [1024, 400_000, 400_000])],
)
def test_a_small_message_is_one_allreduce_and_a_large_one_is_one_more(world, monkeypatch, floats, allreduces):
    counting = Counting(world.transport.comm)
    monkeypatch.setattr(world.transport, "comm", counting)
    monkeypatch.setattr(world.transport, "sum", partial(counting.Allreduce, world.transport.mpi.IN_PLACE))
    for _ in range(2):  # new layouts cost no more than known ones
        x = [[jax.device_put(np.ones(floats, np.float32), d)] for d in world.devices]
        results, _ = world.exchange(SentMessage(x, np.zeros(0, np.float32)), ["sum"])
        np.testing.assert_array_equal(results[0][0], np.full(floats, world.size, np.float32))
    assert counting.nbytes == 2 * allreduces


def test_small_sums_in_double_precision_are_not_rounded(world):
    with jax.enable_x64(True):
        parts = [[jax.device_put(np.array([1 + 2.0**-50]), device)] for device in world.devices]
        results, _ = world.exchange(SentMessage(parts, np.zeros(0)), ["sum"])
        assert results[0][0].dtype == np.float64
        assert float(results[0][0][0]) == world.size * (1 + 2.0**-50)


# --- what a message costs in Python -----------------------------------------------------------------------------------


def calls_of(work) -> list[str]:
    """The names of the Python functions that are called by `work`, but for its own."""
    called: list[str] = []

    def note(frame, event, argument):
        if event == "call":
            called.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called[1:]


@pytest.mark.parametrize(
    ("shapes", "status"),
    [
        ([(100,)], 15),  # one Allreduce
        ([(1000,)], 15),
        ([(1000,), (400, 300)], 15),  # the common message: small leaves packed, and a large one
        ([(1000,), *[(500, 200)] * 8], 15),
        ([(1000,), (1000, 1000)], 0),  # a part of eight pieces
    ],
)
def test_python_calls_of_a_message(world, shapes, status):
    """What grows with parts are calls of MPI, and no Python functions."""
    parts = [[jax.device_put(np.ones(shape, np.float32), device) for shape in shapes] for device in world.devices]
    specs = [PartSpec(shape, np.dtype(np.float32), "sum") for shape in shapes]
    channel, own_status = world.channel(specs, status, "a message"), np.ones(status, np.float32)

    def exchange():
        channel.exchange(SentMessage(parts, own_status, "a message", "", 1))

    exchange()  # the first one may have to ask the others for their devices
    called = calls_of(exchange)
    assert len(called) - 1 <= 4, called  # the last is this function's own call
