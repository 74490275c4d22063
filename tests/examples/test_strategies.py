"""The example of strategies, for an epoch or two."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.mpirun import ROOT, run
from tests.speed import limit

pytestmark = pytest.mark.ranks

SCRIPT = ROOT / "examples" / "strategies.py"
NAMES = ["synchronous", "model_averaging", "pair_averaging", "local_steps", "diloco", "hybrid", "islands"]


def accuracies(printed: str) -> dict[str, float]:
    return {name: float(a) for name, a in re.findall(r"^(\w+) +([\d.]+)% +\d+ +\d+$", printed, re.MULTILINE)}


@pytest.mark.long
def test_one_word_picks_a_strategy():
    command = [sys.executable, str(SCRIPT), "--workers", "2", "--epochs", "2", "--strategy", "hybrid"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == 0, done.stderr
    assert list(accuracies(done.stdout)) == ["hybrid"]
    assert accuracies(done.stdout)["hybrid"] > 30  # of ten classes: it learns


@pytest.mark.long
def test_all_under_mpirun():
    found = accuracies(run([SCRIPT, "--epochs", "6"], n=2).stdout)
    assert list(found) == NAMES
    assert min(found.values()) > 30
