"""The federated example, for a few rounds: under mpirun, and with its clients in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.mpirun import ROOT, run
from tests.speed import limit

pytestmark = pytest.mark.ranks

SCRIPT = ROOT / "examples" / "federated.py"
BRIEF = ["--rounds", "4", "--block", "2", "--local-batch", "16", "--local-steps", "2"]


def check(printed: str, clients: int) -> None:
    assert "a local batch is a multiple of 2 examples" in printed
    shards = [int(n) for n in re.search(r"Shards of ([\d +]+) examples", printed)[1].split(" + ")]
    assert (len(shards), sum(shards)) == (clients, 1437)
    rows = re.findall(r"^ +(\d+)((?: +[\d.]+ +[\d.]+%){2}) +([\d +]+)$", printed, re.MULTILINE)
    assert [int(rounds) for rounds, _, _ in rows] == [2, 4]
    for _, _, batches in rows:
        sizes = [int(n) for n in batches.split(" + ")]
        assert (len(sizes), sum(sizes)) == (clients, 16 * clients)
        assert all(size % 2 == 0 for size in sizes)
    accuracies = [float(a) for a in re.findall(r"([\d.]+)%", rows[-1][1])]
    assert min(accuracies) > 15  # of ten classes: they learn
    assert re.search(r"a round +[\d.]+ times as fast with LB-BSP's local batches", printed)


@pytest.mark.long
def test_under_mpirun():
    check(run([SCRIPT, *BRIEF], n=2).stdout, clients=2)


@pytest.mark.long
@pytest.mark.parametrize("clients", [1, 3])
def test_in_one_process(clients):
    command = [sys.executable, str(SCRIPT), *BRIEF, "--clients", str(clients)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == 0, done.stderr
    check(done.stdout, clients)
