"""Ranks on several hosts: sums of all kinds, with the ranks of a host in a row, and with ranks that die."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import mpirun
from tests.hosts import hosts
from tests.mpirun import Result, run, survives_losses
from tests.speed import limit

pytestmark = [pytest.mark.ranks, pytest.mark.long]

SCRIPT = Path(__file__).parent / "on_hosts.py"


def ended(result: Result, ranks: int) -> None:
    assert result.stdout.count(f"{ranks} ended well") == ranks, result


@pytest.mark.parametrize("where", ["0,1,0,1", "2,5,5,5"])
def test_sums_are_the_same_on_all_ranks(where):
    ended(run([SCRIPT, where], n=len(where.split(","))), len(where.split(",")))


@survives_losses
@pytest.mark.parametrize("death", ["before:1", "after:2", "gather:0"])
def test_a_dying_rank_blocks_nobody(death):
    """On hosts of two ranks each; ranks 0 and 2 are the first of theirs."""
    ended(run([SCRIPT, "0,0,1,1", death], n=4, ours=True), 3)


@pytest.mark.parametrize("placement", ["slot", "node"])
def test_on_hosts_of_their_own(placement):
    with hosts(2, rate="1gbit") as made:
        environ = {**mpirun.environment(), **made.environment()}
        environ["PRTE_MCA_rmaps_default_mapping_policy"] = f"{placement}:oversubscribe"
        options = ["-n", "4", "-H", "h1:2,h2:2"]
        command = made.command("h1", [sys.executable, "-m", "launchers.run", *options, str(SCRIPT), "found"])
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit(60))
    ended(Result(done.returncode, done.stdout, done.stderr, 0.0), 4)
