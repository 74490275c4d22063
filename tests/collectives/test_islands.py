"""Sums within islands, and which workers are on the same host."""

from __future__ import annotations

import json

import numpy as np
import pytest

import adaptive as ad
import collectives as comm
from adaptive import CollectiveError
from adaptive.runtime.local_world import LocalWorld
from collectives._islands import WithinIslands, checked_islands, island_sum


def test_each_worker_has_the_sum_of_its_island_over_microbatches():
    def driver(state, batch):
        total, number = island_sum((batch.sum(), np.int32(1) + 0 * ad.worker_index()), ((0, 2), (1,)))
        return state, {"totals": comm.all_gather(total), "numbers": comm.all_gather(number)}

    ones = np.ones(24, np.float32)
    program = ad.Program(driver, 0.0, ones, global_batch=12, shares=(4, 5, 3), microbatch=2, world=LocalWorld(3))
    metrics = program.step().metrics
    np.testing.assert_array_equal(metrics["totals"], [7, 5, 7])
    np.testing.assert_array_equal(metrics["numbers"], [2, 1, 2])


def test_a_lost_worker_is_in_no_sum():
    assert WithinIslands(((0, 3), (1, 2))).weights(5, (0, 2, 3)) == {0: {0: 1, 3: 1}, 3: {0: 1, 3: 1}, 2: {2: 1}}


def test_islands_are_sorted_and_checked():
    assert checked_islands("islands", [[2, 0], (1,)], 3) == ((0, 2), (1,))
    assert checked_islands("islands", [[np.int64(1), 0]], None) == ((0, 1),)
    for islands in (
        [],
        [[0], []],
        [[0, 0]],
        [[1]],
        [["a"]],
        3,
        [[0, 1]],
        [[0, 1], [1, 2]],
        [[0, 1, 2, 3]],
        [[0, 1, 3]],
    ):
        with pytest.raises(CollectiveError, match="islands="):
            checked_islands("islands", islands, 3)
    for islands in ([[0, 2]], [[1, 2]], [[-1, 0]], [[0, None]], [[0], []]):
        with pytest.raises(CollectiveError, match="islands="):
            checked_islands("islands", islands, None)


class Hosts(LocalWorld):
    """A world of processes on hosts: (host, its workers) of each process."""

    def __init__(self, capacity, of_processes):
        super().__init__(capacity)
        self.of_processes, self.processes = of_processes, len(of_processes)

    def all_gather_bytes(self, value, about="", more=""):
        assert json.loads(value)[1] == list(self.workers)
        return [json.dumps(of_process).encode() for of_process in self.of_processes]


def test_workers_of_a_host_are_together_and_unknown_ones_apart():
    """The last process is in reserve, and slot 4 is empty."""
    world = Hosts(5, [["a", [0]], ["b", [1]], ["a", [2]], ["b", [3]], ["a", []]])
    assert comm.by_host(world) == ((0, 2), (1, 3), (4,))


def test_two_processes_may_be_on_two_hosts_and_one_is_on_its_own():
    assert comm.by_host(Hosts(2, [["a", [0]], ["b", [1]]])) == ((0,), (1,))
    assert comm.by_host(LocalWorld(3)) == ((0, 1, 2),)
