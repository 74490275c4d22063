"""Every second of a job on three ranks has a cause, through kills that it survives and a restart."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from adaptive.observe.ledger import PRODUCTIVE, read_ledger
from tests.mpirun import run, survives_losses

COVERS = ("adaptive/observe/ledger.py", "adaptive/observe/sinks.py")

pytestmark = [pytest.mark.ranks, pytest.mark.long, survives_losses]

SCRIPT = Path(__file__).with_name("ledgered.py")


def test_causes_add_up_through_three_kills_and_a_restart(tmp_path):
    started = time.time()
    for part in (1, 2):
        run([SCRIPT, tmp_path, str(part)], n=3, ours=True, expect_failure=part == 1)
    ledger = read_ledger(tmp_path / "run.jsonl")
    by_cause = ledger.seconds
    times = [[float(word) for word in line.split()] for line in (tmp_path / "steps").read_text().splitlines()]
    (_, script_began), (last, ended) = times[0], times[-1]
    (restored,) = (step for (before, _), (step, _) in pairwise(times) if step < before)  # 60 where disks are slow
    assert (ledger.steps, ledger.starts, ledger.restores, ledger.losses) == (last, 2, 1, 3) == (180, 2, 1, 3)
    # The kernel tells the start of a process by a clock of whole seconds.
    assert started - 1 <= ended - ledger.wall <= script_began + 1 + 0.01 * ledger.wall
    assert sum(by_cause.values()) == pytest.approx(ledger.wall)
    training = ledger.wall - by_cause["start"] - by_cause["down"]
    assert abs(by_cause["unaccounted"]) < 0.01 * training, by_cause
    assert min(seconds for cause, seconds in by_cause.items() if cause != "unaccounted") >= 0, by_cause
    for cause in (*PRODUCTIVE, "start", "restore", "repeated steps", "repairs", "checkpoints", "down", "script"):
        assert by_cause[cause] > 0, by_cause
    # The script sleeps 10 ms after each step, and 0.2 s before each kill, for which the others wait.
    assert by_cause["script"] >= 0.01 * (180 + ledger.repeated - 1)
    assert by_cause["repairs"] + by_cause["waiting"] >= 3 * 0.15, by_cause
    assert restored + ledger.repeated <= 112, "steps after step 112 were never taken"
    assert ledger.repeated > 0
