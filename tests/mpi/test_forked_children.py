"""On ranks: a forked child that uses its parent's world or program gets an error, and the job goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run

pytestmark = pytest.mark.ranks


def test_a_forked_child_gets_an_error_and_the_job_goes_on():
    result = run([Path(__file__).parent / "forked_children.py"], ours=True, timeout=40)
    for name in ("step", "run", "evaluate", "checkpoint"):
        assert result.stdout.count(f"{name}: DriverError: program 1 ('driver') of process ") == 2, result
    assert result.stdout.count("barrier: CollectiveError: the world of process ") == 2, result
    assert result.stdout.count("all_reduce: CollectiveError: a collective is called ") == 2, result
    for slot in (0, 1):
        assert f"slot {slot}: 20 steps, 2 workers, 21 lines, newest 20" in result.stdout, result
