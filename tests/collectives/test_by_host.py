"""Which workers are on the same host."""

from __future__ import annotations

import json

import collectives as comm
from adaptive.runtime.local_world import LocalWorld


class Hosts(LocalWorld):
    """A world of five processes on two hosts, one of which is in reserve, and an empty slot."""

    processes = 5

    def all_gather_bytes(self, value, about="", more=""):
        hosts = [["a", [0]], ["b", [1]], ["a", [2]], ["b", [3]], ["a", []]]
        assert json.loads(value)[1] == list(self.workers)
        return [json.dumps(of_process).encode() for of_process in hosts]


def test_workers_of_a_host_are_together_and_unknown_ones_apart():
    assert comm.by_host(Hosts(5)) == ((0, 2), (1, 3), (4,))


def test_a_single_process_is_a_host():
    assert comm.by_host(LocalWorld(3)) == ((0, 1, 2),)
