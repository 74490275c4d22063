"""Errors of operations over a tree of TCP connections; `test_jax_world.py` has its operations."""

from __future__ import annotations

import threading

import pytest

from adaptive import WorkerError
from collectives.worlds.lifetime import Lifetime
from collectives.worlds.transport.jax_transport import JaxTransport
from collectives.worlds.transport.tcp_tree import TCPTreeError


class ClosedTree:
    """The tree of rank 1 of 3, after another rank has left it."""

    rank, processes = 1, 3

    def __init__(self):
        self.lock, self.threads = threading.Lock(), {}

    def check_open(self):
        raise TCPTreeError("rank 2 has left a collective before its end, by KeyboardInterrupt")


def test_an_operation_on_a_closed_tree_is_an_error_that_says_why():
    world, tree = type("World", (), {})(), ClosedTree()
    with pytest.raises(WorkerError, match=r"rank 1 is disconnected .*: rank 2 has left a collective .*KeyboardInterr"):
        JaxTransport(Lifetime(world), tree).check_usable()
    assert not tree.threads
