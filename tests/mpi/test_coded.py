"""Compressed sums between processes: what one process computes, also through a loss and a join."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses

COVERS = ("collectives/_coded.py",)

pytestmark = [pytest.mark.ranks, survives_losses]


def test_ranks_equal_one_process_and_continue_after_a_loss_and_a_join():
    result = run(Path(__file__).with_name("coded.py"), n=3, ours=True)
    assert result.stdout.count("ended well") == 2, result
