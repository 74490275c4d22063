"""Streamed rounds between processes: what one process computes, also through a loss, a leave and a join."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses

COVERS = ("collectives/strategies/_streamed.py",)

pytestmark = [pytest.mark.ranks, survives_losses]


@pytest.mark.parametrize("fragments", ["dense", "sparse"])
def test_streamed_rounds_on_ranks_are_those_of_one_process_through_a_loss_a_leave_and_a_join(fragments):
    result = run([Path(__file__).with_name("streaming.py"), fragments], n=3, ours=True)
    assert result.stdout.count("ended well") == 2, result
