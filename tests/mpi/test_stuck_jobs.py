"""A rank that does not come is named, and the job ends; one that is slow, or comes after all, is let alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.mpirun import Result, run, survives_losses

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "stuck_jobs.py"
ADAPTIVE = r"(?m)^{} of pid (\d+): rank \d has waited"  # how a report begins


def start(
    case: str, patience: float = 1.0, *, block: bool = False, fails: bool = True, n: int = 2, **more: Any
) -> Result:
    """Run a case to its end, under a plain `python`; nothing of it is left."""
    arguments = [SCRIPT, case, str(patience), *(["block"] * block)]
    result = run(arguments, n=n, expect_failure=fails, timeout=60, by_mpi4py=False, **more)
    pids = [int(pid) for _, pid in ranks(result)]
    assert len(pids) == n, result
    alive = [process for process in map(_process, pids) if process is not None]
    assert not psutil.wait_procs(alive, timeout=10)[1], result
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


def check_said(result: Result, *texts: str, times: int) -> None:
    """So many reports, all on rank 0's terminal, with all the texts; the others take them down."""
    said = re.findall(ADAPTIVE.format("ERROR"), result.stderr)
    assert said == [ranks(result)[0][1]] * times, result
    assert re.search(r"in message 1 of step 4 of program 1 \('driver'\) \(stuck_jobs.py:\d+\):", result.stderr), result
    for text in texts:
        assert re.search(text, result.stderr), (text, result)
    assert "The job ends because of" in result.stderr, result


def test_a_rank_in_the_scripts_own_code():
    result = start("loops", n=3)
    check_said(
        result,
        r"rank 2 \(\S+, pid \d+\) is in the script's own code, between steps \(stuck_jobs.py:\d+\); it has been in no "
        r"collective for \d",
        r'stuck_jobs.py", line \d+, in odd_one\n +while True',
        r"Unless rank 2 comes, the job ends when that is 2 s\. patience= of comm\.world\(\)",
        times=2,
    )
    assert set(re.findall(ADAPTIVE.format("INFO"), result.stderr)) >= {pid for _, pid in ranks(result)[1:2]}


def test_a_rank_that_is_stopped():
    check_said(start("is stopped"), r"rank 1 \(.*\) is stopped \(SIGSTOP.*`kill -CONT \d+`", times=2)


def test_a_rank_whose_python_cannot_run():
    check_said(
        start("holds the lock"),
        "runs, but Python in it does not: C code keeps the interpreter's lock",
        r"Current thread \S+ \(most recent call first\):\n.*in match\n.*stuck_jobs.py\", line \d+ in odd_one",
        times=2,
    )


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (
            "sys.exit",
            r"rank 1 .* has ended: its script is over, at its end, or by sys.exit\(\)\. The last .* step 3 of",
        ),
        ("raises", r"rank 1 .* has ended: its script is over, by OSError: no space left\. The last .* step 3 of"),
    ],
)
def test_a_rank_that_has_left(case, why):
    """It says so itself, so nobody's patience is needed."""
    check_said(start(case, patience=10), why, times=1)


def test_ranks_that_are_at_their_end_while_one_steps():
    result = start("one step more", patience=10)
    assert re.search(r"rank 1 has waited for \S+ s in message 1 of step 9 of program 1", result.stderr), result
    assert re.search(r"rank 0 .* has ended: its script is over, at its end", result.stderr), result


def test_sys_exit_in_the_block_of_a_world():
    result = start("sys.exit", patience=10, block=True)
    assert "ended well" not in result.stdout, result
    assert re.search(r"rank 1: the end of its world's block \(.*\); before it, sys.exit\(\)", result.stderr), result
    assert "rank 0: message 1 of step 4 of program 1" in result.stderr, result


def test_a_rank_that_waits_in_another_world():
    check_said(start("another world"), r"rank 1 .* is in a collective of another world", times=2)


@survives_losses
def test_a_stuck_rank_is_killed_where_its_loss_is_survived():
    result = start("is stopped", n=3, block=True, fails=False, options=["--with-ft", "ulfm"])
    assert "Unless rank 2 comes, rank 2 will be killed when that is 2 s" in result.stderr, result
    assert "rank 2: killed, and lost." in result.stderr, result
    assert result.stdout.count("ended well") == 2, result
    assert len(re.findall(ADAPTIVE.format("ERROR"), result.stderr)) == 2, result


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("is resumed", r"rank 1 .* is stopped"),
        ("compiles", r"rank 1 .* is compiling \(.*\. It is let alone\.\nAs far as can be told, nobody is stuck"),
        (
            "slow at the end",
            r"in the end of its world's block .*\n *rank 1 .*\n(.*\n)*?As far as can be told, nobody is",
        ),
    ],
)
def test_who_is_slow_or_comes_after_all_is_let_alone(case, why):
    result = start(case, patience=3 if case == "is resumed" else 1, block=True, fails=False)
    assert result.stdout.count("ended well") == 2, result
    assert len(re.findall(ADAPTIVE.format("(?:WARNING|ERROR)"), result.stderr)) == 1, result
    assert re.search(why, result.stderr), result
