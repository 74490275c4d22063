"""Ranks that die in any phase: the others continue, and their results are those of one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import Result, run, survives_losses

COVERS = (
    "collectives/worlds/elastic/elastic_processes.py",
    "collectives/worlds/transport/operations.py",
    "collectives/worlds/transport/process_group.py",
)

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "losses.py"


def lose(*deaths: str, n: int = 4, expect_failure: bool = False) -> Result:
    """Run a job in which these ranks die, and the others end well."""
    result = run([SCRIPT, *deaths], n=n, ours=True, expect_failure=expect_failure)
    if not expect_failure:
        dead = sum(":" in death for death in deaths)
        assert result.stdout.count("ended well") == n - dead, result
        assert result.stdout.count(" lost: rank ") == dead, result
    return result


@pytest.mark.long
def test_one_after_another_from_the_start_on():
    lose("before a program is built:2", "the first compile:0", "a hook:3")


@pytest.mark.long
def test_losses_during_the_build_and_between_steps():
    lose("tracing:0", "the background:3", "evaluate:1")


def test_several_at_once_and_in_the_middle_of_an_exchange():
    result = lose("an exchange:0", "an exchange:2", "before a checkpoint:1")
    assert "message 1 of step " in result.stdout, result


@pytest.mark.long
def test_between_steps_and_at_any_time():
    lose("between steps:0", "any time:1")


@pytest.mark.long
def test_too_few_are_left():
    result = lose("between steps:0", "an exchange:2", "min_workers=2", n=3, expect_failure=True)
    assert "1 worker is left, and min_workers=2" in result.stderr, result
