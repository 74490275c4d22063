"""Ranks on several hosts: large sums by hosts or flat, whichever was measured to be faster, and with ranks that die."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mpirun
from tests.hosts import hosts
from tests.mpirun import Result, run, survives_losses
from tests.speed import limit

COVERS = ("collectives/worlds/reducing/inter_host.py", "launchers/declare.py")

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "on_hosts.py"
MEASURED = r"(flat: [\d.]+ ms, hierarchical|hierarchical: [\d.]+ ms, flat) [\d.]+ ms; as measured up to message 5"


def ended(result: Result, ranks: int, way: str) -> None:
    lines = re.findall(rf"^{ranks} ended well, (.*)$", result.stdout, re.MULTILINE)
    assert len(lines) == ranks, result
    assert all(re.fullmatch(way, line) for line in lines), result


@pytest.mark.parametrize(
    "where",
    ["0,1,0,1", pytest.param("2,5,5,5", marks=pytest.mark.long), pytest.param("0,0,1,1", marks=pytest.mark.long)],
)
def test_both_ways_bring_the_same_and_one_is_chosen(where):
    ended(run([SCRIPT, where], n=4), 4, MEASURED)


@pytest.mark.long
def test_a_deterministic_program_uses_one_algorithm():
    ended(run([SCRIPT, "0,1,0"], n=3, env={"TESTS_WAY": "fixed"}), 3, "hierarchical, not measured: .*")


@pytest.mark.long
@pytest.mark.parametrize("where", ["0,0,0", "0,1,2"])
def test_where_there_is_one_way_nothing_is_measured(where):
    ended(run([SCRIPT, where], n=3), 3, "one way")


@pytest.mark.long
@survives_losses
@pytest.mark.parametrize(
    "death",
    [
        "within:1",  # its leader waits for it, and the other host's for the leader
        "between:2",
        "begun:2",  # the other leader has some of what it sends
        "added:2",
        "behind:0",  # others may have all of the sum
        "behind:3",
    ],
)
@pytest.mark.parametrize("where", ["0,0,1,1", "0,1,0,1"])
def test_a_dying_rank_blocks_nobody(where, death):
    if where == "0,1,0,1":
        death = death.replace(":2", ":1")  # the other host's leader
    ended(run([SCRIPT, where, death], n=4, ours=True), 3, "(flat|hierarchical).* ms.*|.*in turn.*")


@pytest.mark.long
def test_on_hosts_of_their_own():
    with hosts(2, rate="1gbit") as made:
        environ = {**mpirun._environment({}), **made.environment()}
        environ["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
        options = ["-n", "4", "-H", "h1:2,h2:2"]
        command = made.command("h1", [sys.executable, "-m", "launchers.run", *options, str(SCRIPT), "found"])
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit(60))
    ended(Result(done.returncode, done.stdout, done.stderr, 0.0), 4, MEASURED)
