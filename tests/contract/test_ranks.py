"""Ranks that die, hang, are preempted or started while others train: what is left has the state of one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

import adaptive as ad
import collectives as comm
from tests.mpirun import Result, run, survives_losses

from .problem import COUNTED, DATA, check_counted, descend_and_count

pytestmark = pytest.mark.ranks
HERE = Path(__file__).parent


def end(case: str, n: int, folder: Path, **options) -> Result:
    return run([HERE / "endings.py", case, folder], n=n, ours=True, **options)


@survives_losses
def test_ranks_that_die_in_a_gradient_and_in_a_hook_rank_0_included(tmp_path):
    result = end("dies", 3, tmp_path)
    assert result.stdout.count("ended well") == 1, result


@survives_losses
def test_a_rank_that_hangs_is_reported_and_removed(tmp_path):
    result = end("hangs", 2, tmp_path)
    assert result.stdout.count("ended well") == 1, result
    assert "SIGSTOP" in result.stderr, result  # what it does


@survives_losses
def test_a_rank_that_was_not_started_is_spawned_and_joins(tmp_path):
    result = end("grows", 1, tmp_path, options=["--bind-to", "none"])
    for worker in (0, 1):
        assert f"worker {worker} is one of 2" in result.stdout, result


@survives_losses
def test_one_preempted_rank_leaves_and_the_others_go_on(tmp_path):
    result = end("one is preempted", 2, tmp_path)
    assert "rank 1 has left" in result.stdout, result
    assert result.stdout.count("ended well") == 1, result


def test_all_preempted_ranks_save_their_state_and_end_with_143(tmp_path):
    result = end("all are preempted", 2, tmp_path, expect_failure=True)
    assert result.returncode == 143, result
    assert "ended well" not in result.stdout, result
    with ad.Program(descend_and_count, COUNTED, DATA, global_batch=12, world=comm.SoloWorld()) as program:
        program.restore(tmp_path / "run")
        assert 5 <= program.steps < 5000
        check_counted(program.state, [12] * program.steps)
