"""A job whose ranks are all killed is started again, and continues from its checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses

COVERS = ("launchers/restarts.py",)

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "restarted.py"


def test_a_job_that_is_killed_as_a_whole_continues_at_its_checkpoint(tmp_path):
    result = run([SCRIPT, tmp_path], ours=True, options=["--restarts", "2"])
    said = re.search(
        r"the job ended with 137; its newest checkpoint is that of step (5|10)\. It is started", result.stderr
    )
    assert said, result
    assert f"from step {said[1]} to 16: {2 * sum(range(64))}" in result.stdout, result  # every example twice


def test_a_job_whose_reserve_is_left_continues_at_its_checkpoint(tmp_path):
    result = run([SCRIPT, tmp_path, 1], n=2, ours=True, options=["--restarts", "2"])
    assert re.search(r"its newest checkpoint is that of step (5|10)\. It is started", result.stderr), result
    assert f"to 16: {2 * sum(range(64))}" in result.stdout, result


def test_a_reserve_without_workers_ends_with_advice(tmp_path):
    result = run([SCRIPT, tmp_path, 1], n=2, ours=True, expect_failure=True)
    assert result.returncode != 0
    assert "this process was on standby, and all workers are lost" in result.stderr, result
    assert "adaptive run --restarts 3" in result.stderr, result


def test_without_the_option_it_ends(tmp_path):
    result = run([SCRIPT, tmp_path], ours=True, expect_failure=True)
    assert result.returncode == 137, result
