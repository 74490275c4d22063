"""Bandwidths between pairs of hosts, and the slow link that they name."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys

import pytest

from collectives.doctor import host_pairs as module
from collectives.doctor.host_pairs import CHUNK_BYTES, HostPair, host_pairs, rounds, slow_links
from tests import mpirun
from tests.hosts import hosts
from tests.speed import limit


class Rank:
    """A rank of three whose links take known seconds for a chunk; it is the leader of a host."""

    def __init__(self, rank, clock):
        self.rank, self._clock = rank, clock

    def Barrier(self):
        pass

    def Sendrecv(self, sent, other, recvbuf, source):
        assert other == source
        self._clock[0] += {2: 0.01, 4: 0.5}[other]

    def gather(self, own, root):
        assert root == 0
        return [own, [HostPair((2, 4), CHUNK_BYTES / 0.5)]] if self.rank == 0 else None


def test_rank_0_knows_the_pairs_by_rank_and_bandwidth(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    found = host_pairs(Rank(0, clock), [0, 2, 4])
    assert {pair.ranks: round(CHUNK_BYTES / pair.bandwidth, 6) for pair in found} == {
        (0, 2): 0.01,
        (0, 4): 0.5,
        (2, 4): 0.5,
    }
    (link,) = slow_links(["a", "a", "b", "b", "c", "c"], found)
    assert link.hosts == ("c",)
    assert host_pairs(Rank(1, clock), [0, 2, 4]) == []


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
def test_each_two_hosts_meet_once_and_a_host_is_in_one_pair_of_a_round(n):
    met = list(rounds(n))
    assert sorted(pair for pairs in met for pair in pairs) == list(itertools.combinations(range(n), 2))
    assert all(len({*itertools.chain(*pairs)}) == 2 * len(pairs) for pairs in met)


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
        environ = {**mpirun.environment(), **made.environment()}
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
