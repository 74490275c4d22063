"""Operations over a tree of TCP connections, with a stand-in for it; `test_jax_world.py` has those of a real one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from adaptive import CollectiveError, DisagreementError, WorkerError
from collectives.worlds.base import Lifetime
from collectives.worlds.transport.jax_transport import JaxTransport
from collectives.worlds.transport.operations import CLOSE, GatherBytes, Operation
from collectives.worlds.transport.tcp_tree import TCPTreeError
from tests.speed import limit


class Tree:
    """The tree of a thread that stands for a process."""

    def __init__(self, rank, meeting, given):
        self.rank, self.processes, self._meeting, self._given = rank, len(given), meeting, given
        self.lock, self.threads, self.closed, self.sums, self.worlds = threading.Lock(), {}, "", 0, 0

    def allgather(self, value):
        self._given[self.rank] = value
        self._meeting.wait()
        everyone = list(self._given)
        self._meeting.wait()
        return everyone

    def sum(self, numbers):
        if self.closed:
            raise TCPTreeError(self.closed)
        self.sums += 1
        numbers[:] = np.sum(self.allgather(numbers.copy()), axis=0)

    def close(self, why):
        self.closed = why


def on_processes(size, work):
    """Return what `work(transport)` returns on each of some processes, with one world each."""
    meeting, given = threading.Barrier(size, timeout=limit(10)), [None] * size

    class World:
        def __repr__(self):
            return "a world"

    world = World()

    def run(rank):
        transport = JaxTransport(Lifetime(world), Tree(rank, meeting, given))
        transport.world = "world 1"
        return work(transport)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def in_an_operation(transport, about, error):
    """Raise an error in an operation."""
    with transport.collective(Operation(about, "", 7)):
        raise error


class Watchdog:
    closed = False

    def close(self):
        self.closed = True


@pytest.mark.parametrize(("leaves", "others"), [(False, False), (True, False), (True, True)])
def test_after_a_disagreement_a_world_is_closed_if_a_process_leaves_it(leaves, others):
    """And stays open if the process leaves another world."""

    def work(transport):
        transport.watchdog = watchdog = Watchdog()
        if others and transport.rank:
            transport.world = "world 2"
        other = Operation("the end", "", CLOSE, is_final=True) if leaves else Operation("another", "", 7)
        with pytest.raises(DisagreementError, match="rank 0: gathering") as e:
            transport.run(other if transport.rank else GatherBytes(b"", "gathering", ""))
        assert ("in world 2" in str(e.value)) is others
        closed = transport.lifetime.closed
        assert watchdog.closed is closed
        transport.lifetime.closed, transport.world = False, "world 1"
        assert transport.all_gather_bytes(b"%d" % transport.rank) == [b"0", b"1"]
        assert not transport.comm.closed
        return closed, transport.activity.begun, 0 < transport.waited < limit(60)

    first, second = on_processes(2, work)
    assert first == (leaves and not others, 2, True)
    assert second == (leaves, 2, True)


def test_a_collective_is_left_before_its_end_only_with_a_closed_tree():
    def work(transport):
        with pytest.raises(KeyboardInterrupt):
            in_an_operation(transport, "a step", KeyboardInterrupt())
        assert transport.comm.closed == "rank 0 has left a collective before its end, by KeyboardInterrupt"
        with pytest.raises(WorkerError, match=r"rank 0 of 1 lost the connection .* by KeyboardInterrupt"):
            transport.barrier()
        transport.comm.closed, transport.lifetime.closed = "", True
        with pytest.raises(CollectiveError, match="a world is used"):
            transport.barrier()
        return transport.inside, transport.lock.locked()

    assert on_processes(1, work) == [(False, False)]


@pytest.mark.parametrize(
    ("error", "about", "says"),
    [
        (TCPTreeError("rank 2 is gone"), "a step", "the others in a step: rank 2 is gone. Most"),
        (jax.errors.JaxRuntimeError("gloo\nmore"), "", "the others: gloo. Most"),
        (jax.errors.JaxRuntimeError(""), "", "the others: JaxRuntimeError. Most"),
    ],
)
def test_errors_of_connections_become_those_of_workers(error, about, says):
    def work(transport):
        with pytest.raises(WorkerError, match=rf"rank 0 of 1 lost the connection to {says} likely"):
            in_an_operation(transport, about, error)
        return True

    assert on_processes(1, work) == [True]
