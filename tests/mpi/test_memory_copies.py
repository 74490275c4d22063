"""Workers that are lost, one or all at once, whose state is in the memory of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpirun import Result, run, survives_losses

COVERS = (
    "adaptive/program/copy_places.py",
    "adaptive/program/memory_copies.py",
    "collectives/worlds/elastic/rendezvous.py",
)

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "copied.py"
STEPS, DIES = 40, 20


def job(case: str, n: int, *hosts: str) -> Result:
    return run([SCRIPT, case, *hosts], n=n, ours=True)


def steps_of(worker: int, result: Result) -> int:
    found = re.search(rf"worker {worker} of \S+.* ended well with (\d+) steps", result.stdout)
    assert found, result
    return int(found[1])


@pytest.mark.parametrize("hosts", [[], pytest.param(["0,1,0"], marks=pytest.mark.long)])
def test_a_worker_from_the_reserve_continues_the_state_of_a_lost_one(hosts):
    result = job("one", 3, *hosts)
    found = re.search(r"worker 2 continues the per-worker state of worker 1 after step (\d+)", result.stdout)
    assert found, result
    assert DIES - 1 <= int(found[1]) <= DIES, result
    assert DIES < steps_of(2, result) <= STEPS, result  # as one that starts has taken fewer


@pytest.mark.long
def test_a_spawned_worker_continues_the_state_of_the_one_in_its_slot():
    result = job("spawned", n=2)
    assert "worker 1 continues the per-worker state of worker 1 after step" in result.stdout, result
    assert DIES < steps_of(1, result) <= STEPS, result


@pytest.mark.parametrize("hosts", [[], ["0,0,1,1"]])
@pytest.mark.parametrize("case", ["all", pytest.param("torn", marks=pytest.mark.long)])
def test_the_reserve_continues_when_all_members_are_lost(case, hosts):
    result = job(case, 4, *hosts)
    found = re.search(r"all members were lost.*continue from the copy in memory after step (\d+)", result.stdout)
    assert found, result
    assert DIES - 1 <= int(found[1]) <= DIES, result
    assert result.stdout.count(" lost: rank ") == 2, result
    for worker in (2, 3):
        assert STEPS - 1 <= steps_of(worker, result) <= STEPS, result


@pytest.mark.parametrize("hosts", [[], pytest.param(["0,0,1"], marks=pytest.mark.long)])
@pytest.mark.parametrize("case", ["beside", pytest.param("at once", marks=pytest.mark.long)])
def test_a_reserve_continues_although_a_spawned_worker_has_joined(case, hosts):
    """Also when all members are lost at once, before they have taken a copy with the new one."""
    result = job(case, 3, *hosts)
    found = re.search(r"all members were lost.*continue from the copy in memory after step (\d+)", result.stdout)
    assert found, result
    lost = DIES if case == "beside" else 6
    assert lost - 2 <= int(found[1]) <= lost, result
    assert result.stdout.count(" lost: rank ") == 3, result
    assert steps_of(2, result) >= STEPS - 2, result


def test_without_copies_that_is_the_end(tmp_path):
    script = tmp_path / "without.py"
    script.write_text(SCRIPT.read_text().replace(", checkpoint=ad.Checkpoints(memory=1, memory_every=1)", ""))
    result = run([script, "all"], n=3, ours=True, expect_failure=True)
    assert "all workers are lost, and with them the run's state" in result.stderr, result
