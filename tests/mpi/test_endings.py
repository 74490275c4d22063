"""How jobs end under `adaptive run`: soon, and with the code of how the program ended."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mpirun
from tests.hosts import hosts
from tests.mpirun import Result, run, survives_losses
from tests.speed import limit

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "endings.py"
GRACE = "--grace", "60"


def end(*cases: str, n: int = 3, code: int = 0) -> Result:
    """Run a job in which these ranks do these things; it ends with this code."""
    result = run([SCRIPT, *cases], n=n, ours=True, expect_failure=code != 0)
    assert result.returncode == code, result
    return result


@pytest.mark.long
def test_a_program_whose_ranks_are_killed_or_leave_ends_well():
    assert end("leaves:0", "killed:2").stdout.count("ended well") == 1


def test_an_error_of_one_rank_ends_the_job():
    result = end("raises:1", n=2, code=1)
    assert "OSError: no space left" in result.stderr, result
    assert "runpy" not in result.stderr, result  # a traceback begins in the script


def test_ranks_that_wait_for_ever_are_ended():
    """The rank reports nothing: its parent sees how it ends."""
    result = end("os._exit 3:1", n=2, code=3)
    assert re.search(r"adaptive run: rank 1 \(pid .*\) ended with exit code 3\.", result.stderr), result


def test_a_rank_that_is_killed_before_its_world():
    """The others would wait in MPI_Init without end."""
    result = end("killed in its import:1", n=2, code=137)
    assert re.search(r"rank 1 \(pid .*\) was killed by SIGKILL before its first world", result.stderr), result


@pytest.mark.long
def test_exit_codes_after_the_world_is_closed():
    """No other rank can replace it there, so the job ends with it."""
    assert end("exit 4 in the end:2", code=4).stdout.count("ended well") == 3
    result = end("killed behind its world:1", code=137)
    assert result.stdout.count("ended well") == 3, result
    assert re.search(r"rank 1 .* was killed by SIGKILL after its last world; the others continue", result.stderr), (
        result
    )


@pytest.mark.long
def test_a_spawned_worker():
    """mpirun alone would end with 137, or hang."""
    end("spawns one that is killed:0", n=1)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGUSR1, 0, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
    ],
)
def test_signals_reach_all_ranks_and_leave_them_time(number, code, monkeypatch):
    arguments = [*GRACE, "-n", "2", str(SCRIPT), "waits for a signal:0", "waits for a signal:1"]
    environ = mpirun.environment()
    command = [sys.executable, "-m", "launchers.run", *arguments]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True) as job:
        try:
            assert job.stdout is not None
            assert [job.stdout.readline(), job.stdout.readline()] == ["waiting\n"] * 2
            job.send_signal(number)
            said = job.communicate(timeout=limit(30))[0]
        finally:
            mpirun._kill(job)
    assert job.returncode == code, said
    assert said.count(f"received {number.name}") == (2 if code == 0 else 0), said


@pytest.mark.long
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_host_that_is_cut_off_ends_the_job_which_goes_on_without_it(restarts, tmp_path):
    with hosts(2) as made:
        environ = {**mpirun.environment(), **made.environment(), "PRTE_MCA_rmaps_default_mapping_policy": "slot"}
        environ["ENDS_WELL"] = str(tmp_path / "cut")
        options = ["--host-timeout", "4", "--restarts", str(restarts), "-n", "2", "-H", "h1:1,h2:1"]
        ranks = [f"meets until its host is cut off:{rank}" for rank in range(2)]
        command = made.command("h1", [sys.executable, "-m", "launchers.run", *options, str(SCRIPT), *ranks])
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True) as job:
            try:
                assert job.stdout is not None
                where = (line for line in job.stdout if line.startswith("on "))
                assert sorted(next(where) for _ in ranks) == ["on h1\n", "on h2\n"]
                (tmp_path / "cut").touch()
                made.cut("h2")
                said = job.communicate(timeout=limit(100))[0]
            finally:
                mpirun._kill(job)
        assert "(pid " in said, said
        assert "is cut off: its host has not answered for 4 s." in said, said
        assert made.wait_until_gone("h2", SCRIPT.name, timeout=limit(60))
        assert job.returncode == (0 if restarts else 128 + signal.SIGKILL), said
        assert ("goes on without h2, which did not answer" in said) is bool(restarts), said
        assert said.count("the world of rank 0 of 1 ended well") == restarts, said


@pytest.mark.long
def test_plain_mpirun_does_not_wait_for_late_finalizers():
    """Rank 1 finalizes when rank 0 is gone, so rank 0 must not wait for it in MPI_Finalize for more than its time."""
    result = run([SCRIPT, "waits until rank 0 is gone:1"], n=2, options=["--with-ft", "ulfm"])
    assert result.stdout.count("ended well") == 2, result
