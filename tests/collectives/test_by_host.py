"""Which workers are on the same host."""

from __future__ import annotations

import json

import collectives as comm
from adaptive.runtime.local_world import LocalWorld

COVERS = ("collectives/_islands.py",)


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


def test_two_processes_may_be_on_two_hosts():
    assert comm.by_host(Hosts(2, [["a", [0]], ["b", [1]]])) == ((0,), (1,))


def test_a_single_process_is_a_host():
    assert comm.by_host(LocalWorld(3)) == ((0, 1, 2),)
