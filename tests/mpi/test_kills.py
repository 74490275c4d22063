"""Ranks that are killed in any phase, stopped, signaled and spawned: what is left has the results of one worker.

tests/contract has a kill of each kind, test_losses_anywhere.py one in each phase on threads, random_faults.py on ranks.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpirun import Result, run, survives_losses
from tests.speed import limit

pytestmark = [pytest.mark.ranks, survives_losses]
long = pytest.mark.long


def job(*arguments: object, n: int, ours: bool = True, fails: bool = False, options: tuple[str, ...] = ()) -> Result:
    script = [Path(__file__).with_name("kills.py"), *map(str, arguments)]
    return run(script, n=n, ours=ours, expect_failure=fails, options=options)


@pytest.mark.parametrize("every", [20, pytest.param(17, marks=long)], ids=["after the run", "due at the last step"])
def test_another_rank_writes_the_last_checkpoint_if_its_writer_is_killed(tmp_path, every):
    result = job("last_checkpoint", tmp_path / "run", every, 34, n=2)
    assert "1 left after step 34, newest 34" in result.stdout, result


@pytest.mark.parametrize(("n", "reserve"), [(1, 0), pytest.param(3, 1, marks=long)])
def test_a_job_whose_workers_are_all_killed_is_started_again_and_continues_at_its_checkpoint(tmp_path, n, reserve):
    result = job("all_at_once", tmp_path, reserve, n=n, options=("--restarts", "2"))
    said = re.search(r"its newest checkpoint is that of step (5|10)\. It is started", result.stderr)
    assert said, result
    assert f"from step {said[1]} to 16" in result.stdout, result


@long
def test_without_the_option_it_ends_and_a_reserve_without_workers_with_advice(tmp_path):
    assert job("all_at_once", tmp_path / "none", 0, n=2, fails=True).returncode == 137
    result = job("all_at_once", tmp_path / "one", 1, n=2, fails=True)
    assert "this process was on standby, and all workers are lost" in result.stderr, result
    assert "adaptive run --restarts 3" in result.stderr, result
    assert result.returncode == 137, result


@long
def test_two_processes_are_spawned_and_join_at_once():
    result = job("grows", n=1)
    for worker in range(3):
        assert f"worker {worker} has joined, members (0, 1, 2)" in result.stdout, result


@long
def test_lost_workers_are_replaced_while_others_are_missing_and_if_one_dies_on_its_way(tmp_path):
    result = job("replaced", tmp_path / "killed", n=3)
    assert result.stdout.count("has joined, members (0, 1, 2)") == 3, result
    assert "has died before it joined; another one is spawned in its place" in result.stderr, result


@long
def test_a_spawned_process_that_is_stuck_or_has_built_something_else_is_found():
    result = job("stopped", limit(1), n=1)
    assert "rank 0 of a spawned job: killed, and lost." in result.stderr, result
    assert "worker 0 has joined, members (0,)" in result.stdout, result
    result = job("another_driver", n=1)
    assert "worker 0 has not grown, members (0,)" in result.stdout, result
    assert "driver differs: " in result.stderr, result
