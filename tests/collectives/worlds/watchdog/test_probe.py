"""Which rank can look at a process of another host."""

from __future__ import annotations

import os

import pytest

from collectives.worlds.watchdog.probe import Peer, Probe
from collectives.worlds.watchdog.stacks import ProcessId


class Silence:
    """Datagrams without a receiver."""

    def join(self, key, own):
        pass

    def send(self, to, addresses, **fields):
        pass

    def receive(self, seconds):
        return None


@pytest.fixture
def probe(monkeypatch):
    """Rank 1 of four on two hosts: 0 and 1, 2 and 3."""
    monkeypatch.setattr("collectives.worlds.watchdog.probe._SECONDS_TO_DO", 0.01)
    process = ProcessId(*[os.getpid()] * len(ProcessId._fields))
    peers = [Peer(number, number // 2 * 2, process, (), b"key", 60.0) for number in range(4)]
    return Probe(peers, 1, Silence())


def test_a_rank_of_this_host_is_looked_at_from_here(probe):
    assert probe.helper(0, set()) == 1
    assert probe.helper(0, {0, 2, 3}) == 1


def test_a_rank_of_another_host_is_looked_at_by_one_there_that_runs(probe):
    assert probe.helper(2, {0, 3}) == 3
    assert probe.helper(3, {0, 2}) == 2
    assert probe.helper(2, {0}) is None  # nobody there runs


def test_a_helper_that_does_not_say_how_it_went_is_not_waited_for(probe):
    assert probe.request(3, "look", 2, lambda message: None) is None
    assert probe.request_report(3, 0.01, lambda message: None, because_of=[2]) is False
