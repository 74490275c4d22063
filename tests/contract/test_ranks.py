"""Programs on MPI ranks: ranks that join, leave, die, hang and are preempted, on the same examples."""

from __future__ import annotations

from pathlib import Path

import pytest

import adaptive as ad
import collectives as comm
from tests.mpirun import Result, run, survives_losses

from .on_ranks import CASES
from .problem import COUNTED, DATA, check_counted, descend_and_count

pytestmark = pytest.mark.ranks
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(scope="module")
def two_ranks(folder) -> Result:
    return run([HERE / "on_ranks.py", folder], n=2)


@pytest.fixture(scope="module")
def three_ranks(folder, two_ranks) -> Result:
    """After those of two ranks, whose checkpoint is restored."""
    return run([HERE / "on_ranks.py", folder], n=3)


@pytest.mark.parametrize("name", [name for name, (n, _) in CASES.items() if n == 2])
def test_on_two_ranks(two_ranks, name):
    assert two_ranks.stdout.count(f"{name}: ok") == 2, two_ranks


@pytest.mark.parametrize("name", [name for name, (n, _) in CASES.items() if n == 3])
def test_on_three_ranks(three_ranks, name):
    assert three_ranks.stdout.count(f"{name}: ok") == 3, three_ranks


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(two_ranks, folder):
    options = {"global_batch": 12, "world": comm.SoloWorld()}
    with ad.Program(descend_and_count, COUNTED, DATA, **options) as program:
        program.restore(folder / "run")
        assert program.steps == 4
        program.step()
        check_counted(program.state, [12] * 5)


def end(case: str, n: int, folder: Path, **options) -> Result:
    return run([HERE / "endings.py", case, folder], n=n, ours=True, **options)


@survives_losses
def test_ranks_that_die_in_a_gradient_and_in_a_hook_rank_0_included(folder):
    result = end("dies", 3, folder)
    assert result.stdout.count("ended well") == 1, result


@survives_losses
def test_a_rank_that_hangs_is_reported_and_removed(folder):
    result = end("hangs", 2, folder)
    assert result.stdout.count("ended well") == 1, result
    assert "SIGSTOP" in result.stderr, result  # what it does


@survives_losses
def test_a_rank_that_was_not_started_is_spawned_and_joins(folder):
    result = end("grows", 1, folder, options=["--bind-to", "none"])
    for worker in (0, 1):
        assert f"worker {worker} is one of 2" in result.stdout, result


@survives_losses
def test_one_preempted_rank_leaves_and_the_others_go_on(folder):
    result = end("one is preempted", 2, folder)
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
