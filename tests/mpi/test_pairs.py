"""Workers that publish and look, in processes: copies are whole, and nobody waits for anybody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import mpirun
from tests.hosts import hosts
from tests.mpirun import run, survives_losses

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "pairs.py"


def test_copies_are_whole_and_nobody_waits(tmp_path):
    result = run([SCRIPT, tmp_path, "whole_copies", "overtaken", "a_stopped_rank", "programs"], n=3)
    for text in ("all copies were whole", "a stopped rank was in nobody's way", "nobody has waited", "ended well"):
        assert result.stdout.count(text) == 3, result
    assert "OSC UCX" not in result.stderr, result


@pytest.mark.long
@survives_losses
def test_a_board_is_made_anew_without_who_is_lost(tmp_path):
    result = run([SCRIPT, tmp_path, "a_lost_rank"], n=3, ours=True)
    assert result.stdout.count("went on without it") == 2, result
    assert result.stdout.count("ended well") == 2, result


@pytest.mark.long
@survives_losses
def test_and_without_who_leaves(tmp_path):
    result = run([SCRIPT, tmp_path, "one_leaves"], n=3, ours=True)
    assert result.stdout.count("one has left") == 3, result
    assert result.stdout.count("ended well") == 3, result


@pytest.mark.long
def test_between_hosts(tmp_path):
    """Who is asked computes, or is stopped."""
    with hosts(2) as made:
        environ = {**mpirun._environment({}, 60), **made.environment(), "PRTE_MCA_rmaps_default_mapping_policy": "slot"}
        arguments = [str(SCRIPT), str(tmp_path), "whole_copies", "a_stopped_rank", "programs"]
        options = ["-n", "3", "-H", "h1:1,h2:2", sys.executable, "-m", "mpi4py"]
        job = subprocess.run(
            made.command("h1", [mpirun._mpirun(), *options, *arguments]),
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert job.stdout.count("ended well") == 3, (job.stdout, job.stderr)
    assert job.stdout.count("nobody has waited") == 3
