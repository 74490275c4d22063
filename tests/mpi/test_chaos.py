"""Jobs to which all kinds of things happen: they end as they must, with what a plain loop brings.

`benchmarks/chaos.py` runs more of them.
"""

from __future__ import annotations

import pytest

from tests.mpirun import survives_losses
from tests.speed import limit

from . import random_faults
from .chaotic import run

COVERS = ("collectives/worlds/elastic/elastic_world.py",)

pytestmark = [pytest.mark.ranks, pytest.mark.long, survives_losses]

# Some hundred events in all: with kills in each phase of a change, several at once, and bad ends.
# 1006 and 1032 lose one while the program is built, 1024 and 1018 rank 0 while it restores.
SEEDS = (1006, 1008, 1011, 1013, 1018, 1021, 1024, 1031, 1032)


@pytest.mark.parametrize("seed", SEEDS)
def test_under_any_faults_the_result_is_that_of_a_plain_loop(seed):
    verdict = run(seed)
    print(verdict)
    assert not verdict.wrong, f"{verdict}\n{verdict.output}"
    assert verdict.events


@pytest.mark.parametrize(("seed", "strategy"), [(1012, "diloco"), (1014, "islands"), (1015, "quorum")])
def test_strategies_of_rounds_beside_it(seed, strategy):
    verdict = run(seed, strategy)
    print(verdict)
    assert not verdict.wrong, f"{verdict}\n{verdict.output}"
    assert verdict.events


@pytest.mark.parametrize("seed", [6, 13, 24, 45])
def test_random_faults_in_random_phases(seed):
    """Two killed while the program is built, one that leaves, all signaled in a restore, and two stopped."""
    fault = random_faults.draw(seed)
    wrong, output = random_faults.run(fault, limit(60))
    assert wrong in ([], [random_faults.NOT_REACHED]), f"{fault}: {wrong}\n{output}"
