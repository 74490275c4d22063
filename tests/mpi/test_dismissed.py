"""On ranks: a policy sees a probe of the links, and a worker that it dismisses leaves the job, which goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses

COVERS = ("collectives/worlds/elastic/elastic_processes.py", "adaptive/control/decisions.py")

pytestmark = [pytest.mark.ranks, survives_losses]


def test_a_probe_is_seen_after_the_next_step_and_a_dismissed_worker_leaves_while_the_others_go_on():
    result = run([Path(__file__).parent / "dismissed.py"], n=4, ours=True)
    assert "5 1 host, [0, 0, 0, -1], (1, 1), after step 4, seen after 5" in result.stdout, result
    assert "dismissed by a hook: worker 1 (pid " in result.stdout, result
    assert "slot 1 left, alone: True, code 0, it was dismissed by a hook, and the others continue" in result.stdout
    for slot in (0, 2, 3):
        assert f"slot {slot} ended with members (0, 2, 3), 1 states" in result.stdout, result
