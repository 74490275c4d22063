"""A rank that does not come is named and removed, or the job ends; one that is slow or late is let alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from math import ceil
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchers.inspection import core_time
from tests import mpirun
from tests.hosts import hosts
from tests.mpirun import Result, run, survives_losses
from tests.speed import at_start, limit, slowness

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "stuck_jobs.py"
KILLED = "rank {0}: killed, and lost."


def start(
    *ways: str,
    n: int = 2,
    hang_timeout: float | None = 1.0,
    block: bool = False,
    fails: bool = True,
    ours: bool = False,
    **more: Any,
) -> Result:
    """Run a job whose last ranks go these ways; nothing of it is left.

    Args:
      hang_timeout: seconds, on an idle machine: a slow one must not make a rank that is well look stuck. None: the
        default.
      ours: by `adaptive run`; else by plain mpirun and `python`.
    """
    seconds = "default" if hang_timeout is None else str(ceil(hang_timeout * max(slowness(), at_start())))
    arguments = [SCRIPT, seconds, "block" if block else "bare", *ways]
    result = run(arguments, n=n, expect_failure=fails, timeout=60, by_mpi4py=False, ours=ours, **more)
    pids = [int(pid) for _, pid in sorted(re.findall(r"rank (\d) pid (\d+)", result.stdout))]
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


def check_said(result: Result, *texts: str) -> None:
    for text in texts:
        assert re.search(text, result.stderr), f"{text} is not in {result}"


@pytest.mark.long
@survives_losses
def test_missing_ranks_are_named_and_removed_and_the_others_go_on():
    result = start("hangs in evaluate", "is stopped", "holds the lock", n=4, block=True, fails=False, ours=True)
    check_said(
        result,
        r"adaptive run: rank 0 \(.*\) has waited for \S+ s in message 1 of step 4 of program 1 \('driver'\):",
        r"rank 1 \(pid \d+ on \S+\) is in evaluate.*\(stuck_jobs.py:\d+\)\. \S+ s ago it began message 1 of step 3",
        r'stuck_jobs.py", line \d+, in evaluated\n +time.sleep',
        r"rank 2 \(.*\) is stopped \(SIGSTOP.*`kill -CONT \d+`",
        "rank 3 .* runs, but its Python does not answer: C code holds the GIL",
        r"Current thread \S+ \(most recent call first\):\n.*stuck_jobs.py\", line \d+ in goes_its_own_way",
        r"Unless .*rank 2.* come.* will be killed when that is \d+ s",
        r"hang_timeout= of comm\.world\(\) sets the time",
        r"rank 2.*: killed, and lost\.",
    )
    assert result.stdout.count("ended well") == 1, str(result)


def test_without_the_launcher_the_waiting_ranks_name_the_missing_one_and_end_the_job():
    result = start("is stopped", hang_timeout=0.5)
    check_said(
        result,
        r"ERROR of pid \d+: rank 0 \(.*\) has waited for \S+ s in message 1 of step 4",
        r"rank 1 \(.*\) is stopped .* \S+ s ago it began message 1 of step 3",
        r"Unless rank .* the job ends when that is \d+ s",
        r"The job ends because of .*rank 1",
    )


@pytest.mark.long
def test_a_rank_whose_reader_hangs_is_named_with_the_example_and_the_readers_stack():
    read = r"waiting for example \d+ of the data \(by thread adaptive-input, for \d+ s\)"
    result = start("hangs in a read", hang_timeout=2, block=True)
    check_said(result, rf"rank 1 \(.*\) is in a step; {read}.*\n(.*\n)*?.*in waits_for_the_disk")
    check_said(result, "The job ends because of rank 1")
    result = start("hangs in a read with a limit", hang_timeout=10, block=True)
    check_said(result, rf"DataError: rank 1 \(pid .*\) has waited \d+ s, the limit of a read: {read}", "waits_for_the")
    check_said(result, r"WorkerError: .*in step \d of program 1.*DataError: rank 1 .* has waited")  # on rank 0
    assert "The job ends because of rank 1" not in result.stderr, str(result)


@pytest.mark.long
@survives_losses
def test_by_default_a_stopped_rank_is_found_early_and_an_idle_one_is_not_reported():
    result = start("rests", "is stopped", n=3, block=True, fails=False, ours=True, hang_timeout=None)
    texts = (
        r"Unless rank 2 comes, rank 2 will be killed when that is \S+ s\. By default that is \S+ s for a rank that is "
        "stopped or idle in a step, and 60 s for others"
    )
    check_said(result, texts, KILLED.format(2))
    assert "rank 1: killed" not in result.stderr, str(result)
    assert result.stdout.count("ended well") == 2, str(result)


@pytest.mark.long
@pytest.mark.skipif(core_time(os.getpid()) is None, reason="this kernel does not count waits for a core")
def test_a_rank_that_waits_for_a_core_is_let_alone():
    """It loops for more than twice the hang_timeout, like one that is stuck, but runs for a fraction of that."""
    result = start("gets no core", block=True, fails=False, ours=True, hang_timeout=1.5)
    texts = r"rank 1 .* It waited for a core for \S+ s of the last \S+ s, which does not count\."
    check_said(result, texts, "As far as is known, no rank is stuck")
    assert "Unless" not in result.stderr, str(result)
    assert result.stdout.count("ended well") == 2, str(result)


@pytest.mark.long
@pytest.mark.parametrize("ours", [True, False])
def test_a_slow_or_late_rank_is_not_ended(ours):
    """Compiling, and then at the end of the world, for more than twice the hang_timeout."""
    result = start("is slow", block=True, fails=False, ours=ours)
    check_said(
        result,
        r"rank 1 .* is compiling \(.*\. Compiling is not limited",
        r"in the end of its world's block:\n *rank 1 .*\n(.*\n)*?As far as is known, no rank is stuck",
    )
    assert "Unless" not in result.stderr, str(result)
    assert result.stdout.count("ended well") == 2, str(result)


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "how"), [("sys.exit", r"at its end, or by sys.exit\(\)"), ("raises", "by OSError: no space left")]
)
def test_without_the_launcher_a_rank_that_has_left_is_not_waited_for(way, how):
    """The rank shows it itself, so no hang_timeout has to pass."""
    check_said(
        start(way, hang_timeout=20),
        rf"rank 1 .* has ended: its script is over, {how}\. The last .* step 3 of program 1",
        "The job ends because of rank 1",
    )


@pytest.mark.long
@survives_losses
def test_the_only_rank_of_a_host_is_killed_by_its_parent():
    seconds = str(ceil(2 * max(slowness(), at_start())))
    with hosts(2) as made:
        environ = {**mpirun.environment(), **made.environment(), "PRTE_MCA_rmaps_default_mapping_policy": "slot"}
        line = [sys.executable, "-m", "launchers.run", "-n", "3", "-H", "h1:2,h2:1"]
        command = made.command("h1", [*line, str(SCRIPT), seconds, "block", "is stopped"])
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit(100))
        assert made.wait_until_gone("h2", SCRIPT.name, timeout=limit(10))
    result = Result(done.returncode, done.stdout, done.stderr, 0.0)
    check_said(result, r"rank 2 \(pid \d+ on h2\) is stopped", KILLED.format(2))
    assert (result.returncode, result.stdout.count("ended well")) == (0, 2), str(result)


@pytest.mark.long
@survives_losses
@pytest.mark.parametrize(
    ("what", "well"), [("parent is stopped", 0), ("parent is killed", 2), ("launcher is stopped", 3)]
)
def test_faults_of_those_that_watch(what, well):
    """A rank whose parent is killed is lost with it; one whose parent is stopped is found, and ends the job. Nobody is
    harmed by a launcher that is stopped for 8 s.
    """
    result = start(what, n=3, block=True, fails=not well, ours=True, hang_timeout=10 if well == 3 else 2)
    assert result.stdout.count("ended well") == well, str(result)
    assert ("rank 2 " in result.stderr and "cannot be examined" in result.stderr) == (not well), str(result)


@pytest.mark.long
def test_sys_exit_in_the_block_of_a_world():
    """All raise at once, in the preamble."""
    result = start("sys.exit", hang_timeout=20, block=True)
    assert "ended well" not in result.stdout, str(result)
    said = r"rank 1: the end of its world's block \(.*\); before it, sys.exit\(\)"
    check_said(result, said, "rank 0: message 1 of step 4 of program 1")


@pytest.mark.long
@pytest.mark.parametrize("ours", [True, False])
def test_a_rank_that_waits_in_another_world(ours):
    result = start("is in another world", ours=ours)
    check_said(
        result,
        r"rank 1 .* is in a collective of another world",
        "Unless rank 1 comes, the job ends when that",
        "The job ends because of rank 1",
    )
