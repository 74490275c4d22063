"""Weighted means of workers' values, some of which are on other processes."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict

import numpy as np
import pytest

from collectives.worlds.reducing import custom_on_processes
from tests.speed import limit

CARRIER = {0: 0, 1: 0, 2: 1, 3: 1}  # ranks of the workers
ROWS = {worker: np.array([worker + 1.0, 10.0 * worker]) for worker in CARRIER}


class Request:
    """What is to be done to complete a message."""

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
def test_each_worker_has_its_weighted_mean_or_its_own_value(weights):
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
