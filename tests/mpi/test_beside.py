"""Ranks on several hosts exchange while they compute, and one of them dies in the midst of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses

COVERS = ("collectives/worlds/reducing/overlapped.py",)

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "beside.py"


def test_sums_do_not_depend_on_concurrent_computation():
    assert run([SCRIPT], n=2).stdout.count("2 ended well") == 2


@survives_losses
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_dies_with_pieces_under_way(rank):
    assert run([SCRIPT, str(rank)], n=3, ours=True).stdout.count("2 ended well") == 2
