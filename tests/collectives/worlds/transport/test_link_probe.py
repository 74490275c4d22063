"""A probe of links: pairs of hosts that are measured at the same time, for a bounded number of bytes and seconds."""

from __future__ import annotations

import itertools
import queue
import threading
import time

import numpy as np
import pytest

from collectives.worlds.transport import link_probe
from collectives.worlds.transport.link_probe import CHUNK_BYTES, LEAST_CHUNKS, MOST_CHUNKS, ProbeLinks, rounds
from collectives.worlds.transport.process_group import Process, ProcessGroup

COVERS = ("adaptive/base/link_probe.py",)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9])
def test_each_pair_is_in_one_round(n):
    found = [*rounds(n)]
    assert sorted(pair for pairs in found for pair in pairs) == [*itertools.combinations(range(n), 2)]
    for pairs in found:
        both = [*itertools.chain(*pairs)]
        assert len(both) == len(set(both)) == n - n % 2


class Switch:
    """Ranks that are threads; `seconds` says how long a chunk of two ranks takes."""

    def __init__(self, hosts, seconds):
        self.barrier, self.seconds, self.gathered = threading.Barrier(len(hosts)), seconds, [None] * len(hosts)
        self.sent = {pair: queue.Queue() for pair in itertools.permutations(range(len(hosts)), 2)}
        self.chunks = dict.fromkeys(self.sent, 0)
        everyone = [Process(range(i, i + 1), f"h{host}", host, 100 + i) for i, host in enumerate(hosts)]
        self.group = ProcessGroup(None, tuple(everyone))

    def probed(self, capacity):
        """Probe the links on all ranks, and return what each got."""
        operations = [ProbeLinks("", lambda: self.group, capacity) for _ in self.gathered]
        threads = [
            threading.Thread(target=operation.carry_out, args=(Rank(self, rank),))
            for rank, operation in enumerate(operations)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [operation.result for operation in operations]


class Rank:
    def __init__(self, switch, rank):
        self.switch, self.rank = switch, rank

    def Sendrecv(self, sent, to, recvbuf, source):
        assert (sent.nbytes, recvbuf.nbytes, to) == (CHUNK_BYTES, CHUNK_BYTES, source)
        self.switch.chunks[self.rank, to] += 1
        self.switch.sent[self.rank, to].put(bytes(sent))
        time.sleep(self.switch.seconds.get(frozenset((self.rank, to)), 0.0))
        recvbuf[:] = np.frombuffer(self.switch.sent[to, self.rank].get(), np.uint8)

    def allgather(self, own):
        self.switch.gathered[self.rank] = own
        self.switch.barrier.wait()
        gathered = list(self.switch.gathered)
        self.switch.barrier.wait()
        return gathered


def test_a_rank_of_each_host_meets_all_others_and_all_know():
    switch = Switch([0, 0, 2, 2, 4, 4], {frozenset((0, 4)): 0.05, frozenset((2, 4)): 0.05})
    first, *others = switch.probed(7)
    assert first.hosts == ("h0", "h2", "h4")
    assert first.host_of.tolist() == [0, 0, 1, 1, 2, 2, -1]
    assert np.isnan(np.diag(first.seconds)).all()
    assert np.array_equal(first.seconds, first.seconds.T, equal_nan=True)
    assert min(first.seconds[0, 2], first.seconds[1, 2]) >= 0.05 * 1e6 / CHUNK_BYTES
    for other in others:
        assert np.array_equal(other.seconds, first.seconds, equal_nan=True)
    assert {rank for pair, chunks in switch.chunks.items() if chunks for rank in pair} == {0, 2, 4}


def test_a_slow_pair_ends_after_the_least_chunks_and_a_fast_one_after_the_most(monkeypatch):
    monkeypatch.setattr(link_probe, "PAIR_SECONDS", 0.2)
    switch = Switch([0, 1], {frozenset((0, 1)): 0.25})
    switch.probed(2)
    assert switch.chunks == {(0, 1): LEAST_CHUNKS, (1, 0): LEAST_CHUNKS}
    monkeypatch.setattr(link_probe, "PAIR_SECONDS", 60.0)
    switch = Switch([0, 1], {})
    switch.probed(2)
    assert switch.chunks == {(0, 1): MOST_CHUNKS, (1, 0): MOST_CHUNKS}


def test_of_many_hosts_some_pairs_are_measured(monkeypatch):
    monkeypatch.setattr(link_probe, "MOST_ROUNDS", 2)
    first, *_ = Switch([*range(6)], {}).probed(6)
    assert np.isfinite(first.seconds).sum() == 2 * 6


def test_no_round_begins_after_the_time_of_a_probe(monkeypatch):
    monkeypatch.setattr(link_probe, "PROBE_SECONDS", 0.0)
    first, second, third = Switch([0, 1, 2], {}).probed(3)
    assert np.isnan(first.seconds).all()
    monkeypatch.setattr(link_probe, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(link_probe, "PAIR_SECONDS", 0.0)
    slow = dict.fromkeys([frozenset(pair) for pair in ((0, 1), (0, 2), (1, 2))], 0.1)
    first, second, third = Switch([0, 1, 2], slow).probed(3)
    assert np.isfinite(first.seconds).sum() == 2, "the first round, of one pair"
    for other in (second, third):
        assert np.array_equal(other.seconds, first.seconds, equal_nan=True)


def test_one_host_has_no_pairs():
    first, second = Switch([3, 3], {}).probed(2)
    assert first.hosts == second.hosts == ("h3",)
    assert np.isnan(first.seconds).all()
