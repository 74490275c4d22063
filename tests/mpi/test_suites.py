"""Test files that also run in one process, on the ranks of an mpirun and on processes that `jax.distributed` joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_suite

pytestmark = [pytest.mark.ranks, pytest.mark.long]

TESTS = Path(__file__).parents[1]
WORLDS, MEETINGS = TESTS / "collectives" / "test_worlds.py", TESTS / "mpi" / "test_meetings.py"
ON_RANKS = TESTS / "mpi" / "test_on_ranks.py"
OF_MPI = "not with_a_world_each"  # its communicators


def test_on_ranks():
    run_suite([WORLDS], 3, "mpi mpi-two-devices")


@pytest.mark.parametrize(
    ("n", "kinds", "files"),
    [(3, "jax jax-uneven", [WORLDS, MEETINGS]), (2, "jax", [ON_RANKS])],
    ids=["worlds", "programs"],
)
def test_on_processes_that_jax_joins(n, kinds, files):
    run_suite(files, n, kinds, "-k", OF_MPI, jax=True)
