"""Workers that publish and read, in processes: copies are consistent, and no read blocks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import mpirun
from tests.hosts import Hosts, hosts
from tests.mpirun import run, survives_losses
from tests.speed import limit

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "pairs.py"


def test_copies_are_consistent_and_reads_do_not_block(tmp_path):
    result = run([SCRIPT, tmp_path, "whole_copies", "a_stopped_rank", "programs"], n=3)
    for text in ("all copies were whole", "a stopped rank was in nobody's way", "nobody has waited", "ended well"):
        assert result.stdout.count(text) == 3, result
    assert "OSC UCX" not in result.stderr, result


@pytest.mark.long
@survives_losses
def test_a_rank_that_dies_while_mailboxes_are_built_blocks_nobody(tmp_path):
    result = run([SCRIPT, tmp_path, "dying_while_mailboxes_are_made"], n=4, ours=True)
    assert result.stdout.count("the last one has a mailbox") == 1, result


# --- between hosts ----------------------------------------------------------------------------------------------------


def job_on(made: Hosts, launcher: Sequence[str], *arguments: object) -> subprocess.Popen:
    """Three ranks, or as many as given: the first on host h1, the others on h2."""
    environ = {**mpirun.environment(), **made.environment()}
    environ["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
    options = [] if "-n" in launcher else ["-n", "3"]
    command = made.command("h1", [*launcher, *options, *map(str, arguments)])
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said_by(job: subprocess.Popen) -> str:
    try:
        said = job.communicate(timeout=limit(60))[0]
    finally:
        mpirun._kill(job)
    assert job.returncode == 0, said
    return said


OURS = [sys.executable, "-m", "launchers.run", "-H", "h1:1,h2:2"]


@pytest.mark.long
@pytest.mark.parametrize("ours", [False, pytest.param(True, marks=survives_losses)])
def test_between_hosts(tmp_path, ours):
    """The process that is read computes, or is stopped."""
    plain = [mpirun._mpirun(), "-H", "h1:1,h2:2"]
    script = [SCRIPT] if ours else [sys.executable, "-m", "mpi4py", SCRIPT]
    cases = ["whole_copies", "a_stopped_rank", "programs"]
    with hosts(2) as made:
        said = said_by(job_on(made, OURS if ours else plain, *script, tmp_path, *cases))
    for text in ("all copies were whole", "a stopped rank was in nobody's way", "nobody has waited", "ended well"):
        assert said.count(text) == 3, said
