"""Small storms: workers that are killed, stopped or receive SIGTERM are replaced, and training loses nothing."""

from __future__ import annotations

import sys

import pytest

from tests.mpirun import ROOT, survives_losses

sys.path.insert(0, str(ROOT / "benchmarks"))  # as it is for a script

import storm

COVERS = (
    "adaptive/control/membership.py",
    "adaptive/program/first_plan.py",
    "collectives/worlds/elastic/elastic_world.py",
    "collectives/worlds/elastic/spawning.py",
)


def test_a_schedule_follows_from_its_seed_and_has_as_many_faults_as_asked_for():
    faults = storm.schedule(1, 36_000.0, 125.0)
    assert faults == storm.schedule(1, 36_000.0, 125.0) != storm.schedule(2, 36_000.0, 125.0)
    assert 1250 - 4 * 1250**0.5 < len(faults) < 1250 + 4 * 1250**0.5
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert {fault.kind for fault in faults} == set(storm.KINDS)
    assert storm.schedule(1, 3600.0, 0.0) == []


@pytest.mark.long
@pytest.mark.ranks
@survives_losses
def test_workers_in_a_storm():
    workers = 4
    faults = [
        storm.Fault(1.0, "kill", 0.0, 0.0),
        storm.Fault(6.0, "stop", 0.5, 1.0),
        storm.Fault(10.0, "SIGTERM", 0.9, 0.0),
    ]
    result = storm.storm(
        workers, 40.0, faults, wait_per_example=5e-3
    )  # spawned processes start on cores that all others use
    assert [event["kind"] for event in result["events"]] == ["kill", "stop", "SIGTERM"]
    assert len(result["repairs"]) == 1
    assert result["least"] < workers  # and in the end:
    assert result["ended"] >= workers - 1
    assert result["alike"]
    assert result["each once"]
    assert result["difference"] < 1e-9
