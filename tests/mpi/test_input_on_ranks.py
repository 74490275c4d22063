"""Every example once, on ranks: read by processes or from an iterator, while workers join and leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run

COVERS = ("adaptive/data/pool.py",)

pytestmark = pytest.mark.ranks


def test_ranks_take_each_example_once_and_hear_if_they_have_not_the_same():
    result = run([Path(__file__).parent / "fed.py"], n=2, ours=True)
    assert result.stdout.count("ended well") == 2, result
    assert result.stdout.count("raised: data['i'] is not the same on all ranks") == 2, result
