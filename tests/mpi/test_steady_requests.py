"""On ranks: each request in a steady step, with nothing else due, is acted on by all processes at the same step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses

COVERS = ("adaptive/program/steady_loop.py", "adaptive/control/membership.py")

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "steady_requests.py"


@survives_losses
@pytest.mark.parametrize("checkpoints", [(), ("checkpoints@0",)])
def test_each_request_takes_effect_with_nothing_else_due(checkpoints):
    events = "set@30", "rescale@60", "leave=1@90", "leave=0@180", "stop@300", *checkpoints
    result = run([SCRIPT, "3", "1", *events], n=3, ours=True)
    assert result.stdout.count("preempted, alone: True") == 2, result
    assert "slot 2: 300 steps, members (2,), batch 30, lr 0.015625, examples as reported" in result.stdout, result


@survives_losses
def test_a_rank_that_may_not_leave_ends_all():
    result = run([SCRIPT, "3", "3", "leave=1@100"], n=3, ours=True, expect_failure=True)
    assert result.returncode == 143, result
    assert result.stdout.count("preempted, alone: False") == 3, result


def test_a_signal_in_reserve_ends_all_where_processes_cannot_leave_alone():
    result = run([SCRIPT, "2", "1", "leave=2@100"], n=3, expect_failure=True)
    assert result.returncode == 143, result
    assert result.stdout.count("preempted, alone: False") == 3, result
