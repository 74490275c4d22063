"""TCP connections between the processes of `jax.distributed`: which are accepted, and errors about missing ones."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import closing, contextmanager

import pytest

from collectives.worlds.launch import LaunchError
from collectives.worlds.transport import tcp_tree
from collectives.worlds.transport.tcp_tree import TCPTreeError
from tests.speed import limit

SECRET = bytes(range(2 * tcp_tree._SECRET))


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(tcp_tree, "_SECONDS_TO_CONNECT", 0.2)


@pytest.fixture
def door():
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door


@contextmanager
def coming(door, *processes):
    """Have threads connect to the door, as (rank, secret). Yields their lines or errors, by rank."""
    results = {}

    def connect(rank, secret):
        try:
            results[rank] = tcp_tree._connect(0, secret, [door.getsockname()], rank)
        except LaunchError as error:
            results[rank] = error

    threads = [threading.Thread(target=connect, args=process) for process in processes]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        for thread in threads:
            thread.join(limit(30))
        for line in results.values():
            if isinstance(line, socket.socket):
                line.close()


@pytest.mark.parametrize("resets", [False, True])
def test_a_rank_that_has_closed_its_connection_is_named(door, resets):
    here = socket.create_connection(door.getsockname())
    there, _ = door.accept()
    if resets:  # instead of an end of its data
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    there.close()
    with closing(here), pytest.raises(TCPTreeError, match="rank 3 has closed its connection"):
        tcp_tree._receive(3, here)


def test_processes_with_the_secret_are_let_in_in_the_order_of_their_ranks(door):
    with coming(door, (2, SECRET), (1, SECRET)) as results:
        admitted = tcp_tree._admit(door, SECRET, [1, 2])
        assert list(admitted) == [1, 2]
        admitted[1].sendall(b"hello")
    assert isinstance(results[1], socket.socket)
    for line in admitted.values():
        line.close()


@pytest.mark.usefixtures("hurried")
def test_a_process_that_never_connects_is_named(door):
    with coming(door, (2, SECRET)), pytest.raises(LaunchError, match="ranks 1, 3 have not connected by TCP"):
        tcp_tree._admit(door, SECRET, [1, 2, 3])


@pytest.mark.usefixtures("hurried")
def test_a_peer_with_another_secret_or_rank_is_refused(door):
    with (
        coming(door, (1, bytes(2 * tcp_tree._SECRET)), (7, SECRET)) as results,
        pytest.raises(LaunchError, match="ranks 1 have not connected"),
    ):
        tcp_tree._admit(door, SECRET, [1])
    assert all("cannot reach rank 0 by TCP" in str(error) for error in results.values())


@pytest.mark.usefixtures("hurried")
def test_a_process_connects_by_whichever_address_answers_with_the_secret(door):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = closed.getsockname()
    with closing(socket.create_connection(door.getsockname())):  # which says nothing, and is not waited for
        pass
    with coming(door), pytest.raises(LaunchError, match="rank 4 cannot reach rank 0 by TCP"):
        tcp_tree._connect(0, SECRET, [nobody], 4)
    admitted = {}
    thread = threading.Thread(target=lambda: admitted.update(tcp_tree._admit(door, SECRET, [4])))
    thread.start()
    with closing(tcp_tree._connect(0, SECRET, [nobody, door.getsockname()], 4)):
        thread.join(limit(30))
    assert list(admitted) == [4]
    admitted[4].close()
