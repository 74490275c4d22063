"""The suite on the ranks of an mpirun, and what only MPI can get wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpirun import run

LIMIT = 200.0  # seconds: many tests in one launch
pytestmark = pytest.mark.ranks

HERE = Path(__file__).parents[1]

SUITE, ALONE = HERE / "test_worlds.py", HERE / "on_ranks.py"


@pytest.mark.parametrize(
    ("ranks", "kind", "files"),
    [
        (2, "mpi mpi-two-devices mpi-uneven", [SUITE, ALONE]),
        pytest.param(3, "mpi", [SUITE, ALONE], marks=pytest.mark.long),
        pytest.param(1, "mpi", [SUITE, ALONE], marks=pytest.mark.long),
    ],
)
def test_the_suite_on_ranks(ranks, kind, files):
    pytest = ["-m", "pytest", "-x", "-q", "--color=no", "-p", "no:cacheprovider", *files]
    result = run(pytest, n=ranks, env={"TESTS_WORLD": kind}, timeout=LIMIT)
    passed = re.search(r"(\d+) passed in", result.stdout)
    assert passed, result
    assert int(passed[1]) >= 35 * len(kind.split()), result
    assert "skipped" not in result.stdout, result
