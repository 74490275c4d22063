"""A rank that does not come is named, and the job ends; one that is slow, or comes after all, is let alone."""

from __future__ import annotations

import os
import re
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import pytest

from collectives.worlds.watchdog.core_time import core_time
from tests.mpirun import Result, run, survives_losses
from tests.speed import at_start, limit, slowness

COVERS = ("collectives/worlds/watchdog/watchdog.py",)

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "stuck_jobs.py"
ADAPTIVE = r"(?m)^{} of pid (\d+): rank \d has waited"  # how a report begins


def start(
    *ways: str, n: int = 2, hang_timeout: float | None = 1.0, block: bool = False, fails: bool = True, **more: Any
) -> Result:
    """Run a job whose last ranks go these ways, under a plain `python`; nothing of it is left.

    Args:
      hang_timeout: seconds, on an idle machine: a slow one must not make a rank that is well look stuck. None: the
        default.
    """
    seconds = "default" if hang_timeout is None else str(ceil(hang_timeout * max(slowness(), at_start())))
    arguments = [SCRIPT, seconds, "block" if block else "bare", *ways]
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


def check_said(result: Result, *texts: str, errors: int | None, warnings: int | None = 0) -> None:
    """So many reports, on rank 0's terminal alone, with all the texts. None: any number, but at least one error."""
    own = ranks(result)[0][1]
    found = re.findall(ADAPTIVE.format("ERROR"), result.stderr)
    assert found == [own] * (max(1, len(found)) if errors is None else errors), str(result)
    warned = re.findall(ADAPTIVE.format("WARNING"), result.stderr)
    assert warned == [own] * (len(warned) if warnings is None else warnings), str(result)
    for text in texts:
        assert re.search(text, result.stderr), f"{text} is not in {result}"


def test_missing_ranks_are_reported():
    """Those that loop are past a deadline later than the one that is stopped, where they share their core."""
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
        r"Unless ranks? (\d, )*2(, \d)* comes?, the job ends when that is \d+ s",
        r"hang_timeout= of comm\.world\(\) sets the time",
        r"The job ends because of ranks? (\d, )*2",
        errors=None,
        warnings=None,
    )
    assert ranks(result)[1][1] in re.findall(ADAPTIVE.format("INFO"), result.stderr), str(result)  # it can take it down


@pytest.mark.long
def test_a_rank_that_loops_is_found_even_if_it_shares_its_core():
    texts = "Unless rank 1 comes, the job ends", "The job ends because of rank 1"
    check_said(start("loops"), *texts, errors=None, warnings=None)  # it may be reported to wait for a core, at first


@pytest.mark.long
@survives_losses
def test_by_default_a_stopped_rank_is_found_early_and_an_idle_one_is_not_reported():
    result = start("rests", "is stopped", n=3, block=True, fails=False, ours=True, hang_timeout=None)
    texts = (
        r"Unless rank 2 comes, rank 2 will be killed when that is \S+ s\. By default that is \S+ s for a rank that is "
        "stopped or idle in a step, and 60 s for others"
    )
    check_said(result, texts, "rank 2: killed, and lost.", errors=2)
    assert result.stdout.count("ended well") == 2, str(result)


@pytest.mark.long
@pytest.mark.skipif(core_time(os.getpid()) is None, reason="this kernel does not say how long processes run")
@survives_losses
def test_a_rank_that_sleeps_in_a_step_is_found_early_by_default():
    result = start("sleeps in a step", n=3, block=True, fails=False, ours=True, hang_timeout=None)
    check_said(result, "rank 2 .* is in a step", "rank 2: killed, and lost.", errors=2)
    assert result.stdout.count("ended well") == 2, str(result)


@pytest.mark.long
@pytest.mark.skipif(core_time(os.getpid()) is None, reason="this kernel does not count waits for a core")
def test_a_rank_that_waits_for_a_core_is_let_alone():
    """It loops for more than twice the hang_timeout, like one that is stuck, but runs for a fraction of that."""
    result = start("gets no core", block=True, fails=False, hang_timeout=1.5)
    texts = r"rank 1 .* It waited for a core for \S+ s of the last \S+ s, which does not count\."
    check_said(result, texts, "As far as is known, no rank is stuck", errors=0, warnings=1)
    assert result.stdout.count("ended well") == 2, str(result)


@pytest.mark.long
def test_a_slow_or_late_rank_is_not_ended():
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
    """The rank reports it itself, so no hang_timeout has to pass."""
    check_said(
        start(way, hang_timeout=20),
        rf"rank 1 .* has ended: its script is over, {how}\. The last .* step 3 of program 1",
        "The job ends because of rank 1",
        errors=1,
    )


@pytest.mark.long  # a plain mpirun now and then does not end behind a loss that was survived
@survives_losses
def test_a_rank_that_has_left_where_losses_are_survived():
    """The rank reports it before it waits in MPI_Finalize, where it cannot answer."""
    result = start("sys.exit", n=3, fails=False, options=["--with-ft", "ulfm"])
    check_said(result, "rank 2 .* has ended: its script is over", "rank 2: killed, and lost.", errors=1)
    assert result.stdout.count("ended well") == 2, str(result)


@pytest.mark.long
def test_a_rank_that_takes_one_step_more():
    result = start("takes one step more", hang_timeout=20)
    assert re.search(r"rank 1 has waited for \S+ s in message 1 of step 9 of program 1", result.stderr), str(result)
    assert re.search(r"rank 0 .* has ended: its script is over, at its end", result.stderr), str(result)


@pytest.mark.long
def test_sys_exit_in_the_block_of_a_world():
    """All raise at once, in the preamble."""
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
