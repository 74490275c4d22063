"""Weighted means of workers' values, some of which are on other processes, and sums in slices."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from adaptive.base.reductions import Sliced
from collectives.compression._wire import Narrow
from collectives.worlds.reducing import custom_on_processes
from tests.collectives.worlds.mpi_of_threads import Job

EVERYONE = -1
CARRIER = {0: 0, 1: 0, 2: 1, 3: 1}  # ranks of the workers
ROWS = {worker: np.array([worker + 1.0, 10.0 * worker]) for worker in CARRIER}


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
    def mix(comm):
        own = {worker: ROWS[worker] for worker, rank in CARRIER.items() if rank == comm.rank}
        found = custom_on_processes.mixed(comm, weights, own, CARRIER)
        assert not any(comm.shared.mail[comm.rank])
        return found

    for rank, rows in enumerate(Job(2).run(mix)):
        assert list(rows) == [worker for worker in CARRIER if CARRIER[worker] == rank]
        for worker, row in rows.items():
            expected = sum(share * ROWS[giver] for giver, share in weights.get(worker, {worker: 1.0}).items())
            np.testing.assert_allclose(row, expected, rtol=1e-12)


class Counting:
    """A communicator that counts the elements that its rank sends to each other rank: in slices, and one by one."""

    def __init__(self, comm, sent, passed):
        self._comm, self._sent, self._passed = comm, sent, passed

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Alltoallv(self, outgoing, incoming):
        for to, count in enumerate(outgoing[1][0]):
            self._sent[self.rank, to] += count
        self._comm.Alltoallv(outgoing, incoming)

    def Allgatherv(self, own, whole):
        self._sent[self.rank, EVERYONE] += own.size
        self._comm.Allgatherv(own, whole)

    def Isend(self, array, target, tag):
        self._passed[self.rank, target] += array.size
        return self._comm.Isend(array, target, tag)


class Sum(Sliced):
    """A sum of int32 that skips zeros, in granules of 4."""

    skips_zeros = True
    granule = 4

    def reduced(self, rows, statistics, step, number):
        return rows.sum(0)


def reduced(op, values, hosts):
    """Reduce a value of each of four processes. Returns how many elements were sent, in slices and one by one."""
    sent, passed = defaultdict(int), defaultdict(int)

    def reduce(comm):
        own, result = values[comm.rank], np.zeros_like(values[comm.rank])
        custom_on_processes.by_slices(Counting(comm, sent, passed), op, {comm.rank: own}, result, 1, hosts)
        assert not any(comm.shared.mail[comm.rank])
        return result

    for result in Job(4).run(reduce):
        np.testing.assert_array_equal(result, sum(values))
    return sent, passed


@pytest.mark.parametrize("senders", [(0, 2), (1,), (0, 1, 2, 3), ()])
@pytest.mark.parametrize(("hosts", "order"), [([0] * 4, [0, 1, 2, 3]), ([0, 1, 1, 0], [0, 3, 1, 2])])
def test_slices_belong_to_the_processes_that_send(senders, hosts, order):
    """A process that sends nothing receives no values to add, and results go around the ring once."""
    values = [np.arange(48, dtype=np.int32) * (rank + 1 if rank in senders else 0) for rank in range(4)]
    sent, passed = reduced(Sum(), values, hosts)
    owners = senders or range(4)
    for (source, target), elements in sent.items():
        assert elements == (48 // len(owners) if {source, target} <= {*owners, EVERYONE} else 0)
    ring = {*zip(order, [*order[1:], order[0]], strict=True)}
    assert set(passed) <= ring
    for source, target in ring:  # in bytes: all but the target's own
        others = sum(4 * 48 // len(owners) for rank in owners if rank != target)
        assert passed[source, target] == (0 if len(owners) == 4 else others)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [3, 5, 5, 5]])
def test_a_host_sends_the_sum_of_its_workers_once(hosts):
    values = [np.float32(np.arange(48) % 7 * (rank + 1)) for rank in range(4)]  # exact in bfloat16
    sent, _ = reduced(Narrow("bfloat16"), values, hosts)
    firsts = {hosts.index(host) for host in hosts}
    for (source, target), elements in sent.items():
        assert target == EVERYONE or elements == (48 // len(firsts) if {source, target} <= firsts else 0)
