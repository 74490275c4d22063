"""A rank that does not come is named, and the job ends; one that is slow, or comes after all, is let alone."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.mpirun import Result, run, survives_losses
from tests.speed import at_start, limit, slowness

COVERS = ("collectives/worlds/watchdog/watchdog.py",)

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "stuck_jobs.py"
ADAPTIVE = r"(?m)^{} of pid (\d+): rank \d has waited"  # how a report begins


def start(
    *ways: str, n: int = 2, hang_timeout: float = 1.0, block: bool = False, fails: bool = True, **more: Any
) -> Result:
    """Run a job whose last ranks go these ways, under a plain `python`; nothing of it is left.

    Args:
      hang_timeout: seconds, on an idle machine: a slow one must not make a rank that is well look stuck.
    """
    hang_timeout = ceil(hang_timeout * max(slowness(), at_start()))
    arguments = [SCRIPT, str(hang_timeout), "block" if block else "bare", *ways]
    result = run(arguments, n=n, expect_failure=fails, timeout=60, by_mpi4py=False, **more)
    pids = [int(pid) for _, pid in ranks(result)]
    assert len(pids) == n, str(result)
    alive = [process for process in map(_process, pids) if process is not None]
    assert not psutil.wait_procs(alive, timeout=limit(10))[1], str(result)
    return result


def _process(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    except psutil.NoSuchProcess:
        return None


def ranks(result: Result) -> list[tuple[str, str]]:
    """Rank and pid of each."""
    return sorted(re.findall(r"rank (\d) pid (\d+)", result.stdout))


def check_said(result: Result, *texts: str, errors: int, warnings: int = 0) -> None:
    """So many reports, on rank 0's terminal alone, with all the texts."""
    own = ranks(result)[0][1]
    assert re.findall(ADAPTIVE.format("ERROR"), result.stderr) == [own] * errors, str(result)
    assert re.findall(ADAPTIVE.format("WARNING"), result.stderr) == [own] * warnings, str(result)
    for text in texts:
        assert re.search(text, result.stderr), f"{text} is not in {result}"


def test_ranks_that_do_not_come():
    result = start("loops", "is stopped", "holds the lock", n=4)
    check_said(
        result,
        r"rank 0 has waited for \S+ s in message 1 of step 4 of program 1 \('driver'\) \(stuck_jobs.py:\d+\):",
        r"rank 1 \(\S+, pid \d+\) is in the script's own code, between steps \(stuck_jobs.py:\d+\); it has been in no "
        r"collective for \d",
        r'stuck_jobs.py", line \d+, in goes_its_own_way\n +while True',
        r"rank 2 \(.*\) is stopped \(SIGSTOP.*`kill -CONT \d+`",
        "rank 3 .* runs, but its Python does not answer: C code holds the GIL",
        r"Current thread \S+ \(most recent call first\):\n.*in match\n.*stuck_jobs.py\", line \d+ in goes_its_own_way",
        r"Unless ranks 1, 2, 3 come, the job ends when that is \d+ s\. hang_timeout= of comm\.world\(\)",
        "The job ends because of ranks 1, 2, 3",
        errors=2,
    )
    assert ranks(result)[1][1] in re.findall(ADAPTIVE.format("INFO"), result.stderr), str(result)  # it can take it down


@survives_losses
def test_a_stuck_rank_is_killed_where_its_loss_is_survived():
    result = start(
        "is stopped", n=3, block=True, fails=False, ours=True
    )  # mpirun itself now and then does not end then
    told = r"Unless rank 2 comes, rank 2 will be killed when that is \d+ s"
    check_said(result, told, "rank 2: killed, and lost.", errors=2)
    assert result.stdout.count("ended well") == 2, str(result)


@pytest.mark.long
def test_who_is_slow_or_comes_after_all_is_let_alone():
    """Stopped for less than twice the hang_timeout; compiling, and then at the end of the world, for more."""
    check_said(
        start("is slow", block=True, fails=False, hang_timeout=1.5),
        r"rank 1 .* is stopped",
        r"rank 1 .* is compiling \(.*\. Compiling is not limited\.\nAs far as is known, no rank is stuck",
        r"in the end of its world's block .*\n *rank 1 .*\n(.*\n)*?As far as is known, no rank is stuck",
        errors=1,
        warnings=2,
    )


@pytest.mark.parametrize(
    ("way", "how"),
    [
        ("sys.exit", r"at its end, or by sys.exit\(\)"),
        pytest.param("raises", "by OSError: no space left", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_has_left(way, how):
    """It says so itself, so no hang_timeout has to pass."""
    check_said(
        start(way, hang_timeout=20),
        rf"rank 1 .* has ended: its script is over, {how}\. The last .* step 3 of program 1",
        "The job ends because of rank 1",
        errors=1,
    )


@pytest.mark.long  # a plain mpirun now and then does not end behind a loss that was survived
@survives_losses
def test_a_rank_that_has_left_where_losses_are_survived():
    """It says so before it waits in MPI_Finalize, where nobody could ask it."""
    result = start("sys.exit", n=3, fails=False, options=["--with-ft", "ulfm"])
    check_said(result, "rank 2 .* has ended: its script is over", "rank 2: killed, and lost.", errors=1)
    assert result.stdout.count("ended well") == 2, str(result)


@pytest.mark.long
def test_a_rank_that_takes_one_step_more():
    result = start("takes one step more", hang_timeout=20)
    assert re.search(r"rank 1 has waited for \S+ s in message 1 of step 9 of program 1", result.stderr), str(result)
    assert re.search(r"rank 0 .* has ended: its script is over, at its end", result.stderr), str(result)


def test_sys_exit_in_the_block_of_a_world():
    """All are told at once, in the frame."""
    result = start("sys.exit", hang_timeout=20, block=True)
    assert "ended well" not in result.stdout, str(result)
    assert re.search(r"rank 1: the end of its world's block \(.*\); before it, sys.exit\(\)", result.stderr), str(
        result
    )
    assert "rank 0: message 1 of step 4 of program 1" in result.stderr, str(result)


@pytest.mark.long
def test_a_rank_that_waits_in_another_world():
    result = start("is in another world")
    check_said(result, r"rank 1 .* is in a collective of another world", "The job ends because of rank 1", errors=2)
