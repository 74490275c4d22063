"""Rounds by quorum between processes: slow ranks count in later rounds; a loss changes the quorum."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses

COVERS = ("collectives/strategies/_quorum.py", "adaptive/operators/round_clock.py")

pytestmark = [pytest.mark.ranks, survives_losses]


def test_a_slow_rank_counts_in_later_rounds_and_a_loss_changes_the_quorum():
    result = run(Path(__file__).with_name("quorum_on_ranks.py"), n=3, ours=True)
    assert result.stdout.count("ended well") == 2, result
