"""TCP connections between the processes of `jax.distributed`: which are accepted, and errors about missing ones."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
import numpy as np
import pytest

from collectives.worlds.launch import LaunchError
from collectives.worlds.transport import tcp_tree
from collectives.worlds.transport.tcp_tree import TCPTree, TCPTreeError
from tests.speed import limit

KEY = bytes(range(32))


@pytest.fixture
def door():
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door


@contextmanager
def coming(door, *processes):
    """Have threads connect to the door, as (rank, key). Yields their connections or errors, by rank."""
    results = {}

    def go(rank, key):
        try:
            results[rank] = tcp_tree._connect(rank, 0, [door.getsockname()], key)
        except LaunchError as error:
            results[rank] = error

    threads = [threading.Thread(target=go, args=process) for process in processes]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        for thread in threads:
            thread.join(limit(30))


def test_processes_with_the_key_are_let_in_in_the_order_of_their_ranks(door):
    with coming(door, (2, KEY), (1, KEY)) as results:
        admitted = tcp_tree._admit(door, KEY, [1, 2])
        assert list(admitted) == [1, 2]
        admitted[1].send_bytes(b"hello")
    assert results[1].recv_bytes() == b"hello"
    with socket.socket(fileno=os.dup(admitted[2].fileno())) as line:
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # a small message is not held back


def test_a_process_that_does_not_connect_or_has_another_key_is_named(door, monkeypatch):
    monkeypatch.setattr(tcp_tree, "_SECONDS_TO_CONNECT", 0.2)
    with (
        coming(door, (1, bytes(32)), (2, KEY)) as results,
        pytest.raises(LaunchError, match="ranks 1, 3 have not connected by TCP"),
    ):
        tcp_tree._admit(door, KEY, [1, 2, 3])
    assert "rank 1 cannot reach rank 0 by TCP" in str(results[1])


# --- trees of processes that are threads ------------------------------------------------------------------------------


@pytest.fixture
def exits(monkeypatch):
    """What is to be done at the exit of a process."""
    found = []
    monkeypatch.setattr(tcp_tree.atexit, "register", found.append)
    return found


@pytest.fixture
def grown(monkeypatch, exits):
    """Make the trees of so many processes, and call `work(tree)` on each. Returns what it returns, by rank."""
    monkeypatch.setattr(tcp_tree, "BELOW", 2)

    def grow(processes, work):
        own, announced = threading.local(), [b""] * processes
        barrier = threading.Barrier(processes, timeout=limit(20))

        def of_everyone(data):
            announced[own.rank] = data
            barrier.wait()
            return list(announced)

        def run(rank):
            own.rank = rank
            tree = TCPTree()
            try:
                return work(tree)
            finally:
                barrier.wait()
                tree.close("the test is over")

        monkeypatch.setattr(tcp_tree, "_of_everyone", of_everyone)
        monkeypatch.setattr(jax, "process_index", lambda: own.rank)
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        with ThreadPoolExecutor(processes) as pool:
            return list(pool.map(run, range(processes)))

    return grow


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_all_get_the_same_sums_and_values(grown, processes):
    rows = np.random.default_rng(0).normal(size=(processes, 50)) * 10.0 ** np.arange(processes)[:, None]

    def work(tree):
        found = []
        for size in (50, 3, 3):
            numbers = rows[tree.rank, :size].copy()
            with np.errstate(all="raise"):
                tree.sum(numbers)
            found.append(numbers.tobytes())
        found += [tree.allgather((tree.rank, "x" * 1000 * tree.rank)) for _ in range(2)]
        numbers = np.array([1e308, -np.inf])
        with np.errstate(all="raise"):
            tree.sum(numbers)
        return [*found, numbers.tolist(), tree.processes]

    values = [(rank, "x" * 1000 * rank) for rank in range(processes)]
    largest = 1e308 if processes == 1 else np.inf
    (first, *sums), *others = [(found[0], *found[1:]) for found in grown(processes, work)]
    np.testing.assert_allclose(np.frombuffer(first), rows.sum(0))
    assert sums == [first[:24]] * 2 + [values, values, [largest, -np.inf], processes]
    assert others == [(first, *sums)] * (processes - 1)


@pytest.mark.parametrize(("leaves", "gathers"), [(0, False), (1, True), (2, False), (5, True)])
def test_when_a_process_leaves_all_notice_and_use_the_tree_no_more(grown, leaves, gathers):
    def work(tree):
        if tree.rank == leaves:
            tree.close("rank has left")
            tree.close("again")
        else:
            with pytest.raises(TCPTreeError, match="has closed its connection") as e:
                tree.allgather(1) if gathers else tree.sum(np.ones(3))
            with pytest.raises(TCPTreeError, match=str(e.value)):
                tree.sum(np.ones(3))
        with pytest.raises(TCPTreeError) as e:
            tree.sum(np.ones(3))
        return str(e.value) == "rank has left"

    assert grown(6, work) == [rank == leaves for rank in range(6)]


def test_an_aborted_collective_closes_the_tree(grown):
    def work(tree):
        with pytest.raises(Exception, match=r"pickle|closed its connection"):
            tree.allgather(threading.Lock() if tree.rank == 1 else 0)
        with pytest.raises(TCPTreeError) as e:
            tree.sum(np.ones(3))
        return str(e.value)

    first, second, third = grown(3, work)
    assert second == "a collective was aborted by TypeError"
    assert first == "rank 1 has closed its connection: it ended, or lost another rank"
    assert third == "rank 0 has closed its connection: it ended, or lost another rank"


@pytest.mark.parametrize("lost", [False, True])
def test_at_its_exit_a_process_waits_for_nobody_if_one_was_lost(grown, exits, monkeypatch, lost):
    ended = threading.Event()
    monkeypatch.setattr(tcp_tree, "_end_soon", ended.set)

    def work(tree):
        if lost:
            tree.close("rank 1 has closed its connection")
        (at_exit,) = exits
        at_exit()
        with pytest.raises(TCPTreeError, match="rank 1 has closed" if lost else "its script is over"):
            tree.sum(np.ones(3))
        return True

    assert grown(1, work) == [True]
    assert ended.wait(limit(20) if lost else 0) is lost


def test_where_not_all_processes_come_or_xla_cannot_connect_them_there_is_a_launch_error(monkeypatch):
    assert tcp_tree._of_everyone(b"here")[0].rstrip(b"\0") == b"here"

    def fails(*_):
        raise RuntimeError("no gloo\nat all")

    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", fails)
    with pytest.raises(LaunchError, match=r"cannot be connected: no gloo\. On CPUs, call"):
        tcp_tree._of_everyone(b"here")
    come = threading.Event()

    def waits(*_):
        come.wait(limit(20))
        raise RuntimeError

    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", waits)
    monkeypatch.setattr(tcp_tree, "SECONDS_TO_COME", 0.01)
    with pytest.raises(LaunchError, match=r"not all 1 processes .* within 0.01 s"):
        tcp_tree._of_everyone(b"here")
    come.set()
