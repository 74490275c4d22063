"""Processes that log are killed and started again: a reader finds each step once, in order, as it was taken last."""

from __future__ import annotations

import csv
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import adaptive as ad
from adaptive.extend import read_run
from tests.adaptive.event_files import scalars
from tests.mpirun import ROOT, run, survives_losses
from tests.speed import limit

SCRIPT = Path(__file__).parent / "killed_while_logging.py"
STEPS = 40


def check(folder: Path, attempts: dict[int, int]) -> None:
    """Each log has all steps once, in order; `attempts`: by the first step, in which attempt it was taken last."""
    steps = range(1, STEPS + 1)
    wanted = [(step, float(attempts[max(first for first in attempts if first <= step)])) for step in steps]
    with (folder / "run.csv").open(newline="") as file:  # as `drop_duplicates(["run_id", "step"], keep="last")`
        last = {(row["run_id"], int(row["step"])): float(row["attempt"]) for row in csv.DictReader(file)}
    assert sorted((step, attempt) for (_, step), attempt in last.items()) == wanted
    assert len({run_id for run_id, _ in last}) == 1
    recorded = [fields for _, fields in read_run(folder / "run.jsonl").steps]
    assert [(line["step"], line["metrics"]["attempt"]) for line in recorded] == wanted
    assert scalars(folder / "board", "attempt") == wanted


def test_a_run_that_is_killed_between_two_checkpoints_and_started_again(tmp_path, monkeypatch):
    command = [str(SCRIPT), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *command, "17"], cwd=ROOT, capture_output=True, text=True, timeout=limit(100)
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    monkeypatch.setattr(sys, "argv", [*command, "0"])
    runpy.run_path(str(SCRIPT))
    check(tmp_path, {1: 1, 11: 2})
    record = ad.log.read(tmp_path / "run.jsonl")
    restores, repeated = record["restores"], record["repeated"]  # the last tenth of a second before a kill is missing
    assert np.flatnonzero(restores).tolist() == [10]
    assert 0 < repeated[10] <= 7


@pytest.mark.ranks
@pytest.mark.long
@survives_losses
def test_another_rank_continues_the_logs_of_a_killed_writer(tmp_path):
    """The other writes what the first one had not written yet, and nothing twice."""
    result = run([SCRIPT, tmp_path, "17", "0"], n=3, ours=True)
    assert result.stdout.count("ended after step 40, epoch 10") == 2, result
    check(tmp_path, {1: 1})
    assert len(list((tmp_path / "board").iterdir())) == 2
    assert not ad.log.read(tmp_path / "run.jsonl")["restores"].any()  # no step was taken again
