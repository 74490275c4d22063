"""Workers that publish and read, in processes: copies are consistent, and no read blocks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import mpirun
from tests.hosts import hosts
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


@pytest.mark.long
@survives_losses
def test_between_hosts(tmp_path):
    """The process that is read computes, or is stopped."""
    cases = ["whole_copies", "a_stopped_rank", "programs"]
    with hosts(2) as made:
        environ = {**mpirun.environment(), **made.environment()}
        environ["PRTE_MCA_rmaps_default_mapping_policy"] = "slot:oversubscribe"
        ours = [sys.executable, "-m", "launchers.run", "-H", "h1:1,h2:2", "-n", "3"]  # one rank on the first host
        command = made.command("h1", [*ours, str(SCRIPT), str(tmp_path), *cases])
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit(60))
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    for text in ("all copies were whole", "a stopped rank was in nobody's way", "nobody has waited", "ended well"):
        assert said.count(text) == 3, said
