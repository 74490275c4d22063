"""Pairs of hosts that are measured at the same time, and the slow link that they name."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import threading
import time

import pytest

from collectives.doctor import host_pairs as module
from collectives.doctor.host_pairs import HostPair, host_pairs, rounds, slow_links
from tests import mpirun
from tests.hosts import hosts
from tests.speed import limit


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9])
def test_each_pair_is_in_one_round(n):
    found = [*rounds(n)]
    assert sorted(pair for pairs in found for pair in pairs) == [*itertools.combinations(range(n), 2)]
    for pairs in found:
        both = [*itertools.chain(*pairs)]
        assert len(both) == len(set(both)) == n - n % 2


class Switch:
    """Ranks that are threads; `seconds` says how long an exchange of two ranks takes."""

    def __init__(self, size, seconds):
        self.barrier, self.seconds, self.told, self.calls = threading.Barrier(size), seconds, [None] * size, []

    def run(self, rank, leaders, results):
        results[rank] = host_pairs(Rank(self, rank), leaders)


class Rank:
    def __init__(self, switch, rank):
        self.switch, self.rank = switch, rank

    def Barrier(self):
        self.switch.barrier.wait()

    def Sendrecv(self, sent, to, recvbuf, source):
        assert (sent.nbytes, recvbuf.nbytes, to) == (module.PROBE_BYTES, module.PROBE_BYTES, source)
        self.switch.calls.append((self.rank, to))
        time.sleep(self.switch.seconds.get(frozenset((self.rank, to)), 0.0))

    def gather(self, own, root):
        self.switch.told[self.rank] = own
        self.switch.barrier.wait()
        return self.switch.told if self.rank == root else None


def measured(size, leaders, seconds):
    switch, results = Switch(size, seconds), [None] * size
    threads = [threading.Thread(target=switch.run, args=(rank, leaders, results)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return switch, results


def test_a_rank_of_each_host_meets_all_others_and_rank_0_knows():
    slow = {frozenset((0, 4)): 0.2, frozenset((2, 4)): 0.2}
    switch, (found, *others) = measured(6, [0, 2, 4], slow)
    assert others == [[]] * 5
    assert sorted(pair.ranks for pair in found) == [(0, 2), (0, 4), (2, 4)]
    assert {rank for rank, _ in switch.calls} == {0, 2, 4}
    (link,) = slow_links(["a", "a", "b", "b", "c", "c"], found)
    assert link.hosts == ("c",)
    assert link.bandwidth <= module.PROBE_BYTES / 0.2


def test_of_many_hosts_some_pairs_are_measured(monkeypatch):
    monkeypatch.setattr(module, "MOST_ROUNDS", 2)
    _, (found, *_) = measured(6, [*range(6)], {})
    assert len(found) == 2 * 3


def test_one_host_has_no_pairs():
    switch, results = measured(2, [0], {})
    assert results == [[], []]
    assert switch.calls == []


def pairs_of(rates):
    return [HostPair(ranks, rate) for ranks, rate in rates.items()]


def test_slow_pairs_are_named():
    names = "abcd"
    usual = dict.fromkeys(itertools.combinations(range(4), 2), 10.0)
    assert slow_links(names, pairs_of(usual)) == []
    assert slow_links(names, pairs_of(usual | {(1, 2): 5.0})) == [], "not less than half"
    (one,) = slow_links(names, pairs_of(usual | {(1, 2): 4.0}))
    assert (one.hosts, one.bandwidth, one.usual) == (("b", "c"), 4.0, 10.0)
    of_d = usual | {(0, 3): 1.0, (1, 3): 2.0, (2, 3): 3.0}
    (host,) = slow_links(names, pairs_of(of_d))
    assert (host.hosts, host.bandwidth, host.usual) == (("d",), 3.0, 10.0)
    both = slow_links(names, pairs_of(of_d | {(0, 1): 4.0}))
    assert [slow.hosts for slow in both] == [("d",), ("a", "b")]
    assert slow_links("ab", pairs_of({(0, 1): 1.0})) == []


@pytest.mark.ranks
@pytest.mark.long
def test_the_host_behind_a_slow_link_is_named():
    if shutil.which("tc") is None:
        pytest.skip("a link's rate is limited by tc")
    with hosts(3) as made:
        made.limit("h3", "100mbit")
        environ = {**mpirun._environment({}), **made.environment()}
        environ["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
        options = ["-n", "3", "-H", "h1:1,h2:1,h3:1"]
        command = [sys.executable, "-m", "launchers.run", *options, "-m", "collectives.doctor", "--json"]
        done = subprocess.run(
            made.command("h1", command), env=environ, capture_output=True, text=True, timeout=limit(100), check=False
        )
    found = json.loads(done.stdout)
    assert [pair["ranks"] for pair in found["pairs"]] != []
    slow = [finding["what"] for finding in found["findings"] if "is slow" in finding["what"]]
    assert len(slow) == 1, found
    assert slow[0].startswith("The link of h3 is slow: at most 0.01")
