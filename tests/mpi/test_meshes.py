"""Workers that are meshes leave, join and are lost: see meshes.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses

pytestmark = [pytest.mark.ranks, survives_losses]


def test_meshes_leave_join_and_are_lost_with_the_states_of_one_device():
    result = run([Path(__file__).with_name("meshes.py")], n=2, ours=True)
    assert result.stdout.count("equal after") == 1, result
