"""Every kind of source on one worker, with the library that it is of: taken as it should be, or refused by name."""

from __future__ import annotations

import pytest

import collectives as comm
from tests.sources.catalogue import GROUPS, PAGE, cases, part
from tests.sources.checks import check, program_of, refusal

COVERS = ("adaptive/data/pool.py", "adaptive/data/reading.py")

STEPS, KEPT = 11, 3  # two epochs and a part of the third; the checkpoint is in mid-epoch


@pytest.mark.parametrize(("group", "row"), cases(lambda row: row.taken))
def test_each_example_occurs_once_per_epoch_and_a_restored_program_repeats_the_steps(group, row):
    with program_of(row, group.build(row), world=comm.SoloWorld()) as program:
        seen = [check(row, program, program.step()) for _ in range(KEPT)]
        kept = program.checkpoint()
        seen += [check(row, program, program.step()) for _ in range(STEPS - KEPT)]
    # While the first one is held, its kernels are not compiled again.
    with program_of(row, group.build(row), world=comm.SoloWorld()) as restored:
        restored.restore(kept)
        assert [check(row, restored, restored.step()) for _ in range(STEPS - KEPT)] == seen[KEPT:]


@pytest.mark.parametrize(("group", "row"), cases(lambda row: not row.taken))
def test_unsupported_data_is_refused_when_the_program_is_built(group, row):
    assert row.refused in refusal(group, row)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_the_documentation_has_the_table(group):
    if why := group.missing(*group.rows):
        pytest.skip(why)
    assert part(group) in PAGE.read_text(), "the table has changed: python -m tests.sources.catalogue"
