"""If one rank fails in any way, the job ends: with an error that names it, a status other than 0, and no orphans."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.mpirun import Result, run
from tests.speed import limit

COVERS = ("adaptive/base/failure.py",)

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "failing_jobs.py"


def fail(case: str) -> Result:
    """Run a case, which must end by itself with a failure, and leave no process."""
    result = run([SCRIPT, case], n=2, expect_failure=True, timeout=60)
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", result.stdout)]
    assert len(pids) == 2, result
    alive = [p for p in map(_process, pids) if p is not None and p.status() != psutil.STATUS_ZOMBIE]
    assert not psutil.wait_procs(alive, timeout=limit(10))[1], result
    assert "ended well" not in result.stdout, result
    return result


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def test_the_same_job_ends_well_if_left_alone():
    assert run([SCRIPT, "well"], n=2, timeout=60).stdout.count("ended well") == 2


def test_a_driver_that_forgets_to_reduce():
    result = fail("forgets")
    assert "ReplicationError: the new state can differ between workers" in result.stderr, result
    assert re.search(r"comes from this worker's examples \(failing_jobs.py:\d+\)", result.stderr), result


def test_a_hook_that_raises_on_one_rank():
    result = fail("a hook on one rank")
    assert "RuntimeError: out of ideas" in result.stderr, result
    assert re.search(r"In hook 'adapt' \(failing_jobs.py:\d+\), after step 3", result.stderr), result
    assert "on worker 1" in result.stderr, result


def test_an_error_in_the_code_around_the_steps():
    assert "OSError: no space left for a checkpoint" in fail("between steps").stderr


@pytest.mark.parametrize("case", ["a rank that is killed", "ctrl-c"])
def test_signals(case):
    fail(case)
