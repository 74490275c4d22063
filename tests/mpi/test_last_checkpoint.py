"""On ranks: a run ends when the last checkpoint is on disk, although the rank that writes it is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses

COVERS = ("adaptive/program/run_checkpointer.py", "adaptive/program/runs.py")

pytestmark = [pytest.mark.ranks, survives_losses]


@pytest.mark.parametrize(("every", "steps"), [(20, 34), (17, 34)], ids=["after the run", "due at the last step"])
def test_another_rank_writes_the_last_checkpoint_if_its_writer_is_killed(tmp_path, every, steps):
    result = run([Path(__file__).parent / "last_checkpoint.py", tmp_path / "run", every, steps], ours=True)
    assert f"1 left after step {steps}, newest {steps}" in result.stdout, result
