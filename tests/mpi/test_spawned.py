"""Processes that are spawned while a job runs, and join it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses
from tests.speed import limit

COVERS = (
    "adaptive/program/state_transfer.py",
    "collectives/worlds/elastic/rendezvous.py",
    "collectives/worlds/elastic/spawning.py",
    "collectives/worlds/elastic/standby.py",
)

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "spawned.py"


def test_more_workers_are_asked_for_than_were_started():
    result = run([SCRIPT, "grows"], n=1, ours=True)
    assert "worker 0 ended well: joined, members (0, 1, 2)" in result.stdout, result
    assert "worker 1 ended well" in result.stdout, result
    assert "worker 2 ended well" in result.stdout, result


def test_a_spawned_process_that_is_stuck_is_found():
    result = run([SCRIPT, "is stopped", str(limit(1))], n=1, ours=True)
    assert "rank 1: killed, and lost." in result.stderr, result
    assert "worker 0 ended well: joined, members (0,)" in result.stdout, result


def test_lost_workers_are_replaced_while_others_are_missing_and_if_one_dies_on_its_way(tmp_path):
    result = run([SCRIPT, "replaced", tmp_path / "killed"], n=3, ours=True)
    assert result.stdout.count("ended well: joined, members (0, 1, 2)") == 3, result
    assert "has died before it joined; another one is spawned in its place" in result.stderr, result


@pytest.mark.long
def test_a_process_that_has_built_something_else_is_not_let_in():
    result = run([SCRIPT, "another driver"], n=1, ours=True)
    assert "worker 0 ended well: did not grow, members (0,)" in result.stdout, result
    assert "driver differs: " in result.stderr, result
