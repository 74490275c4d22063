"""Weighted means of workers' values, some of which are on other processes, and sums in slices."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict

import numpy as np
import pytest

from adaptive.base.reductions import Sliced
from collectives.compression._wire import Narrow
from collectives.worlds.reducing import custom_on_processes
from tests.speed import limit

EVERYONE = -1
CARRIER = {0: 0, 1: 0, 2: 1, 3: 1}  # ranks of the workers
ROWS = {worker: np.array([worker + 1.0, 10.0 * worker]) for worker in CARRIER}


class Request:
    """The operations that complete a message."""

    def __init__(self, complete):
        self.Wait = complete


class Comm:
    """A communicator of threads: messages between two of them arrive in the order in which they were sent."""

    def __init__(self, rank, lines):
        self.rank, self._lines = rank, lines

    def Isend(self, piece, to, tag):
        self._lines[self.rank, to].put(np.array(piece))
        return Request(lambda: None)

    def Irecv(self, room, sender, tag):
        return Request(lambda: np.copyto(room, self._lines[sender, self.rank].get(timeout=limit(20))))


@pytest.mark.parametrize(
    "weights",
    [
        {0: {0: 0.5, 1: 0.5}},
        {0: {0: 0.5, 2: 0.5}, 2: {0: 0.25, 2: 0.75}},
        {1: {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}, 3: {3: 1.0}},
        {worker: {worker: 0.5, (worker + 1) % 4: 0.5} for worker in range(4)},
        {},
    ],
)
def test_each_worker_gets_its_weighted_mean_or_its_own_value(weights):
    lines, found = defaultdict(queue.Queue), {}
    comms = [Comm(rank, lines) for rank in range(2)]
    for pair in ((0, 1), (1, 0)):
        lines[pair] = queue.Queue()

    def mix(comm):
        own = {worker: ROWS[worker] for worker, rank in CARRIER.items() if rank == comm.rank}
        found[comm.rank] = custom_on_processes.mixed(comm, weights, own, CARRIER)

    threads = [threading.Thread(target=mix, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(30))
    assert {worker for rows in found.values() for worker in rows} == set(CARRIER)
    for rank, rows in found.items():
        for worker, row in rows.items():
            assert CARRIER[worker] == rank
            expected = sum(share * ROWS[giver] for giver, share in weights.get(worker, {worker: 1.0}).items())
            np.testing.assert_allclose(row, expected, rtol=1e-12)
    assert all(line.empty() for line in lines.values())


class Slices:
    """A communicator of threads for slices, which counts the elements that a rank sends to each other rank."""

    def __init__(self, rank, common):
        self.rank, self.size, self._common = rank, common.size, common

    def _exchanged(self, own):
        return self._common.exchanged(self.rank, own)

    def allgather(self, own):
        return self._exchanged(own)

    def Alltoallv(self, outgoing, incoming):
        words, (counts, starts) = outgoing
        pieces = [np.array(words[start : start + count]) for count, start in zip(counts, starts, strict=True)]
        for to, piece in enumerate(pieces):
            self._common.sent[self.rank, to] += piece.size
        words, (counts, starts) = incoming
        for everyone, count, start in zip(self._exchanged(pieces), counts, starts, strict=True):
            words[start : start + count] = everyone[self.rank]

    def Allgatherv(self, own, gathered):
        words, (counts, starts) = gathered
        for piece, count, start in zip(self._exchanged(np.array(own)), counts, starts, strict=True):
            words[start : start + count] = piece
        self._common.sent[self.rank, EVERYONE] += own.size

    def Send(self, array, target, tag):
        self._common.lines[self.rank, target].put(array.copy())
        self._common.passed[self.rank, target] += array.size

    def Recv(self, array, source, tag):
        array[:] = self._common.lines[source, self.rank].get(timeout=limit(20))

    def Sendrecv(self, outgoing, target, tag, incoming, source, its_tag):
        self.Send(outgoing, target, tag)
        self.Recv(incoming, source, its_tag)


class Common:
    """What threads share."""

    def __init__(self, size):
        self.size, self.sent, self.passed = size, defaultdict(int), defaultdict(int)
        self.lines = {(i, j): queue.Queue() for i in range(size) for j in range(size)}
        self._values, self._barrier = [None] * size, threading.Barrier(size, timeout=limit(20))

    def exchanged(self, rank, own):
        self._values[rank] = own
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class Sum(Sliced):
    """A sum of int32 that skips zeros, in granules of 4."""

    skips_zeros = True
    granule = 4

    def reduced(self, rows, statistics, step, number):
        return rows.sum(0)


@pytest.mark.parametrize("senders", [(0, 2), (1,), (0, 1, 2, 3), ()])
@pytest.mark.parametrize(("hosts", "order"), [([0] * 4, [0, 1, 2, 3]), ([0, 1, 1, 0], [0, 3, 1, 2])])
def test_slices_belong_to_the_processes_that_send(senders, hosts, order):
    """A process that sends nothing receives no values to add, and results go around the ring once."""
    common, op, results = Common(4), Sum(), {}
    values = {rank: np.arange(48, dtype=np.int32) * (rank + 1 if rank in senders else 0) for rank in range(4)}

    def reduce(rank):
        results[rank] = np.zeros(48, np.int32)
        custom_on_processes.by_slices(Slices(rank, common), op, {rank: values[rank]}, results[rank], 1, hosts)

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(60))
    for result in results.values():
        np.testing.assert_array_equal(result, sum(values.values()))
    owners = senders or range(4)
    for (source, target), elements in common.sent.items():
        assert elements == (48 // len(owners) if {source, target} <= {*owners, EVERYONE} else 0)
    ring = {*zip(order, [*order[1:], order[0]], strict=True)}
    assert set(common.passed) <= ring
    for source, target in ring:  # in bytes: all but the target's own
        others = sum(4 * 48 // len(owners) for rank in owners if rank != target)
        assert common.passed[source, target] == (0 if len(owners) == 4 else others)
    assert all(line.empty() for line in common.lines.values())


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [3, 5, 5, 5]])
def test_a_host_sends_the_sum_of_its_workers_once(hosts):
    common, op, results, size = Common(4), Narrow("bfloat16"), {}, 48
    values = {rank: np.float32(np.arange(size) % 7 * (rank + 1)) for rank in range(4)}  # exact in bfloat16

    def reduce(rank):
        results[rank] = np.zeros(size, np.float32)
        custom_on_processes.by_slices(Slices(rank, common), op, {rank: values[rank]}, results[rank], 1, hosts)

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit(60))
    for result in results.values():
        np.testing.assert_array_equal(result, sum(values.values()))
    firsts = {hosts.index(host) for host in hosts}
    for (source, target), elements in common.sent.items():
        assert target == EVERYONE or elements == (size // len(firsts) if {source, target} <= firsts else 0)
    assert all(line.empty() for line in common.lines.values())
