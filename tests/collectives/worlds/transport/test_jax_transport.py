"""Errors in operations over a tree of TCP connections; `test_on_jax_processes.py` has operations of real ones."""

from __future__ import annotations

from threading import Lock
from types import SimpleNamespace

import jax
import pytest

from adaptive import CollectiveError, WorkerError
from collectives.worlds.base import Lifetime
from collectives.worlds.transport.jax_transport import JaxTransport
from collectives.worlds.transport.operations import Operation
from collectives.worlds.transport.tcp_tree import TCPTreeError


class Tree(SimpleNamespace):
    """The tree of a process that is alone."""

    closed = ""

    def sum(self, numbers):
        if self.closed:
            raise TCPTreeError(self.closed)

    def close(self, why):
        self.closed = why


class World:
    def __repr__(self):
        return "a world"


WORLD = World()


@pytest.fixture
def transport():
    return JaxTransport(Lifetime(WORLD), Tree(rank=0, processes=1, lock=Lock(), threads={}))


def in_an_operation(transport, about, error):
    """Raise an error in an operation."""
    with transport.collective(Operation(about, "", 7)):
        raise error


def test_a_collective_is_left_before_its_end_only_with_a_closed_tree(transport):
    with pytest.raises(KeyboardInterrupt):
        in_an_operation(transport, "a step", KeyboardInterrupt())
    assert transport.comm.closed == "rank 0 has left a collective before its end, by KeyboardInterrupt"
    with pytest.raises(WorkerError, match=r"rank 0 of 1 lost the connection .* by KeyboardInterrupt"):
        transport.barrier()
    transport.comm.closed, transport.lifetime.closed = "", True
    with pytest.raises(CollectiveError, match="a world is used"):
        transport.barrier()
    assert not transport.inside
    assert not transport.lock.locked()


@pytest.mark.parametrize(
    ("error", "about", "says"),
    [
        (TCPTreeError("rank 2 is gone"), "a step", "the others in a step: rank 2 is gone. Most"),
        (jax.errors.JaxRuntimeError("gloo\nmore"), "", "the others: gloo. Most"),
        (jax.errors.JaxRuntimeError(""), "", "the others: JaxRuntimeError. Most"),
    ],
)
def test_errors_of_connections_become_those_of_workers(error, about, says, transport):
    with pytest.raises(WorkerError, match=rf"rank 0 of 1 lost the connection to {says} likely"):
        in_an_operation(transport, about, error)
