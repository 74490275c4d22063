"""Jobs that fail and are started again by `adaptive run --restarts`. Without MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from launchers.restarts import JobEnd, Restarts
from tests.mpirun import ROOT
from tests.speed import limit

# Counts its starts in a file; what it does in each is an argument: CODE, or CODE@STEP if it has saved a checkpoint.
RANK = """
import os, signal, sys
from pathlib import Path
from launchers import ending

starts = Path(sys.argv[1])
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("*" * (number + 1))
code, _, step = sys.argv[2:][number].partition("@")
ending.prepare()
if step:
    ending.report(saved=int(step))
if code == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(code))
"""


def ended(*ends: tuple[int, int | None], most: int = 3) -> list[bool]:
    starts = Restarts(most)
    return [starts.after(JobEnd(code, None, saved))[0] for code, saved in ends]


@pytest.mark.parametrize("end", [JobEnd(0, None, None), JobEnd(2, None, None), JobEnd(143, signal.SIGTERM, 5)])
def test_a_job_that_is_complete_or_was_signaled_is_not_restarted(end):
    assert Restarts(3).after(end) == (False, "")
    assert Restarts(0).after(JobEnd(137, None, 5)) == (False, "")


def test_a_job_that_makes_progress_is_started_again_without_limit_and_others_so_many_times():
    for code in (1, 137):
        assert ended(*((code, step) for step in range(10)), most=1) == [True] * 10
    assert ended((137, 5), (137, 5), (137, 5), most=2) == [True, True, False]
    assert ended(*[(137, None)] * 4) == [True, True, True, False]


def test_a_program_that_fails_twice_in_the_same_way_is_not_restarted():
    assert ended((1, 5), (1, 7), (1, None)) == [True, True, False]
    assert ended((1, None), (1, None)) == [True, False]
    assert ended((1, None), (3, None), (137, None), (3, None)) == [True, True, True, False]
    starts = Restarts(3)
    starts.after(JobEnd(1, None, None))
    assert starts.after(JobEnd(1, None, None))[1] == (
        "the job ended with 1; it has written no checkpoint, as when it failed before. It is not started again."
    )


def test_the_exit_code_is_that_of_the_last_start(tmp_path, fake_mpirun):
    rank = tmp_path / "rank.py"
    rank.write_text(RANK)
    program = ["--begin", str(rank), str(tmp_path / "starts"), "kill", "1@4", "0"]
    job = subprocess.run(
        [sys.executable, "-m", "launchers.run", "--mpirun", fake_mpirun, "-n", "1", "--restarts", "2", *program],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=limit(100),
    )  # fmt: skip
    said = job.stderr
    assert job.returncode == 0, said
    assert "adaptive run: the job ended with 137; it has written no checkpoint. It is started again (1 of 2)." in said
    assert "the job ended with 1; its newest checkpoint is that of step 4. It is started again (1 of 2)." in said
