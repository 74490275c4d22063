"""Every kind of source on three ranks: workers leave, come back and die in mid-epoch, and programs are restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses
from tests.sources.catalogue import GROUPS
from tests.sources.rows import Group, name

COVERS = ("adaptive/data/reading.py",)

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "on_ranks.py"
WALKS = 8  # sources in one job


def names(group: Group, *, quick: bool) -> list[str]:
    """The sources of a group that can be taken here."""
    rows = (row for row in group.rows if row.taken and row.quick == quick)
    return [name(group, row) for row in rows if not group.missing(row)]


def jobs(size: int) -> list[pytest.ParameterSet]:
    """All sources, so many in each job; `make test` runs the first."""
    quick, long = ([n for group in GROUPS for n in names(group, quick=quick)] for quick in (True, False))
    return [
        pytest.param(found[k : k + size], id=f"{found[k]} …", marks=[pytest.mark.long] * bool(found is long or k))
        for found in (quick, long)
        for k in range(0, len(found), size)
    ]


@pytest.mark.parametrize("sources", jobs(WALKS))
def test_a_worker_leaves_and_returns_and_a_restored_program_repeats_the_steps(sources):
    result = run([SCRIPT, "walk", *sources], n=3, ours=True)
    assert result.stdout.count("ended well") == 3, result
    assert result.stdout.count("walk ") == 3 * len(sources), result


@pytest.mark.parametrize("sources", jobs(2))
def test_a_rank_dies_and_the_others_take_each_example_once(sources):
    result = run([SCRIPT, "kill", *sources], n=3, ours=True)
    assert result.stdout.count("ended well") == 3 - len(sources), result
    assert result.stdout.count(f"kill {sources[0]} (") == 2, result
