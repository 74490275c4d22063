"""Sources on ranks: workers leave, come back and die in mid-epoch, and programs are restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpirun import run, survives_losses
from tests.sources.catalogue import GROUPS
from tests.sources.rows import name

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "on_ranks.py"
SOURCES = [name(group, row) for group in GROUPS if not group.missing() for row in group.rows if row.on_ranks]
PLAIN = [source for source in SOURCES if source.startswith(GROUPS[0].title)]
# The libraries take seconds to import, so they are left to the long tests.
JOBS = [
    (PLAIN[:1], PLAIN[1:]),
    *(pytest.param(pair, pair, marks=pytest.mark.long) for pair in zip(SOURCES[::2], SOURCES[1::2], strict=False)),
]


@pytest.mark.parametrize(("walked", "killed"), JOBS)
def test_workers_leave_return_and_die_and_each_example_is_taken_once(walked, killed):
    ranks = 1 + len(killed)
    result = run([SCRIPT, *walked, "kill", *killed], n=ranks, ours=True)
    assert result.stdout.count("ended well") == 1, result
