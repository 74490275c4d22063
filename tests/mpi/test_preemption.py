"""Ranks that receive SIGTERM in any phase: one leaves and the others continue; or all save, and end with 143."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adaptive.disk.folders import checkpoints
from tests import mpirun
from tests.mpirun import Result, run, survives_losses
from tests.speed import limit

COVERS = ("collectives/worlds/elastic/elastic_processes.py",)

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "preempted.py"
ULFM = "--with-ft", "ulfm"


def leave(*phases: str, n: int = 4, workers: int | None = None) -> Result:
    """Run a job in which these ranks are signaled, one at a time, and the others end well."""
    options = ["at once", "steps=30", *([] if workers is None else [f"workers={workers}"])]
    result = run([SCRIPT, "-", *phases, *options], n=n, ours=True)
    assert result.stdout.count("ended well") == n - len(phases), result
    assert result.stdout.count("left alone") == len(phases), result
    return result


def left_after(result: Result) -> list[int]:
    """The steps after which workers have left, as rank 0 reports."""
    notes = [line for line in result.stdout.splitlines() if "upon a termination signal" in line]
    return [int(note.split("left after step ")[1].split(",")[0]) for note in notes]


def end(directory: Path, *arguments: str, n: int, ulfm: bool) -> Result:
    """Run a job whose ranks are all signaled: all end with 143, and the last state is on disk."""
    options = ULFM if ulfm else ()
    result = run([SCRIPT, directory, *arguments], n=n, options=options, expect_failure=True)
    check_end(directory, n, result)
    return result


def check_end(directory: Path, n: int, result: Result) -> None:
    assert result.returncode == 143, result
    assert result.stdout.count("ends with all") == n, result
    last = checkpoints(directory)[0].name.split("-")[-1]
    assert f"ends after step {last}." in result.stdout, result


@pytest.mark.long
def test_one_after_another_from_the_start_on():
    result = leave("before a program is built:2", "the first compile:0", "a hook twice:3")
    assert left_after(result) == [1, 7]  # two of them after the first; one signaled after a step leaves after the next


@pytest.mark.long
def test_while_it_is_built_and_in_an_exchange():
    leave("tracing:0", "an exchange twice:3", "blocked:1")


def test_beside_the_steps():
    assert left_after(leave("between steps twice:0", "evaluate:1", "before a checkpoint:3")) == [8, 21, 26]


@pytest.mark.long
def test_in_reserve():
    """At the end of the run the others do not wait for it, and all present ranks meet."""
    assert left_after(leave("in reserve twice:3", workers=2)) == []


@pytest.mark.long
def test_all_and_from_three_ranks_to_two_to_three_to_one(tmp_path):
    """Under every launcher, the last state is saved and resumed, and nothing is lost."""
    directory = tmp_path / "run"
    check_end(directory, 3, by_our_launcher(directory))
    end(directory, "within 100 ms:0", "within 100 ms twice:1", n=2, ulfm=True)
    result = end(directory, "a checkpoint on disk:1", n=3, ulfm=False)
    assert (
        "worker 1 received a termination signal, and in this job a single process cannot leave (SIGTERM)"
        in result.stdout
    )
    result = run([SCRIPT, directory, "steps=10"], n=1)
    assert "ended well" in result.stdout, result


@pytest.mark.long
def test_in_reserve_where_processes_cannot_leave_alone(tmp_path):
    result = end(tmp_path / "run", "workers=2", "in reserve:2", n=3, ulfm=False)
    assert "a single process cannot leave (reported by a process in reserve)" in result.stdout, result


def by_our_launcher(directory: Path) -> Result:
    """The launcher gets the signal, and passes it to all ranks."""
    command = [sys.executable, "-m", "launchers.run", "-n", "3", str(SCRIPT), str(directory)]
    environ, pipe = mpirun._environment({}), subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "under way\n"
            os.kill(job.pid, signal.SIGTERM)
            stdout, stderr = job.communicate(timeout=limit(60))
        finally:
            mpirun._kill(job)
    return Result(job.returncode, stdout, stderr, 0.0)
