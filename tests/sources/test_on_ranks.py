"""Every kind of source on three ranks: workers leave, come back and die in mid-epoch, and programs are restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses
from tests.sources.catalogue import GROUPS
from tests.sources.rows import name

COVERS = ("adaptive/data/rows.py",)

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "on_ranks.py"
SOURCES = [name(group, row) for group in GROUPS if not group.missing() for row in group.rows if row.quick]


def test_a_worker_leaves_and_returns_and_a_restored_program_repeats_the_steps():
    result = run([SCRIPT, "walk", *SOURCES], n=3, ours=True)
    assert result.stdout.count("ended well") == 3, result
    assert result.stdout.count("walk ") == 3 * len(SOURCES), result


KILLS = [SOURCES[k : k + 2] for k in range(0, len(SOURCES), 2)]


@pytest.mark.parametrize(
    "sources", [pytest.param(found, marks=[pytest.mark.long] * (found is not KILLS[1])) for found in KILLS]
)
def test_a_rank_dies_and_the_others_take_each_example_once(sources):
    result = run([SCRIPT, "kill", *sources], n=3, ours=True)
    assert result.stdout.count("ended well") == 3 - len(sources), result
    assert result.stdout.count(f"kill {sources[0]} (") == 2, result
