"""How jobs end under `python -m collectives.mpirun`: soon, and with the code of how the program ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mpirun
from tests.hosts import hosts
from tests.mpirun import Result, run, survives_losses

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "endings.py"
GRACE = "--grace", "60"


def end(*cases: str, n: int = 3, code: int = 0) -> Result:
    """Run a job in which these ranks do these things; it ends with this code."""
    result = run([SCRIPT, *cases], n=n, ours=True, expect_failure=code != 0)
    assert result.returncode == code, result
    return result


@pytest.mark.parametrize("cases", [[], ["killed:1"], ["killed:0", "killed:2"], ["leaves:0", "killed:2"]], ids=" ".join)
def test_a_program_that_ends_well(cases):
    assert end(*cases).stdout.count("ended well") == 3 - len(cases)


def test_an_error_of_one_rank_ends_the_job():
    result = end("raises:1", code=1)
    assert "OSError: no space left" in result.stderr, result
    assert "runpy" not in result.stderr, result  # a traceback begins in the script


def test_an_exit_of_one_rank_ends_the_job_though_others_wait_for_it():
    result = end("sys.exit 3:1", code=3)
    assert "rank 1 (pid" in result.stderr, result
    assert "ended with 3, and others go on; the job is ended" in result.stderr, result


def test_codes_behind_the_world():
    """Nobody does what a rank does there, so it cannot be lost."""
    assert end("exit 4 in the end:2", code=4).stdout.count("ended well") == 3
    assert end("killed behind its world:1", code=1).stdout.count("ended well") == 3


def test_a_spawned_worker():
    """mpirun alone would end with 137, or hang."""
    end("spawns one that is killed:0", n=1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 0), (signal.SIGINT, 130)])
def test_signals_reach_all_ranks_and_leave_them_time(number, code, monkeypatch):
    arguments = [*GRACE, "-n", "2", str(SCRIPT), "waits for a signal:0", "waits for a signal:1"]
    environ = mpirun._environment({}, 60)
    command = [sys.executable, "-m", "collectives.mpirun", *arguments]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True) as job:
        try:
            assert job.stdout is not None
            assert [job.stdout.readline(), job.stdout.readline()] == ["waiting\n"] * 2
            job.send_signal(number)
            said = job.communicate(timeout=30)[0]
        finally:
            mpirun._kill(job)
    assert job.returncode == code, said
    assert said.count(f"told {number.name}") == (2 if code == 0 else 0), said


def test_a_host_that_is_cut_off():
    """mpirun gives up the job on both sides; it must not be taken for a good end."""
    with hosts(2) as made:
        environ = {**mpirun._environment({}, 60), **made.environment(), "PRTE_MCA_rmaps_default_mapping_policy": "slot"}
        options = ["--detect", "6", "-n", "2", "-H", "h1:1,h2:1"]
        command = [
            sys.executable,
            "-m",
            "collectives.mpirun",
            *options,
            str(SCRIPT),
            "meets for ever:0",
            "meets for ever:1",
        ]
        with subprocess.Popen(made.command("h1", command), env=environ, stdout=subprocess.PIPE, text=True) as job:
            try:
                assert job.stdout is not None
                where = (line for line in job.stdout if line.startswith("on "))
                assert {next(where), next(where)} == {"on h1\n", "on h2\n"}
                made.cut("h2")
                said = job.communicate(timeout=60)[0]
            finally:
                mpirun._kill(job)
        assert job.returncode not in (0, None), said
        assert made.wait_until_gone("h2", SCRIPT.name, timeout=60)
