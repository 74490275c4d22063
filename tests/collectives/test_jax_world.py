"""The suite on processes that jax.distributed joins, and what only these can get wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jaxrun import run

LIMIT = 160.0  # seconds: many tests in one launch
pytestmark = pytest.mark.ranks

HERE = Path(__file__).parent
SUITE, ALONE = HERE / "test_worlds.py", HERE / "on_jax_processes.py"


def run_suite(kind: str, n: int, *files: Path) -> list[str]:
    """Run test files on `n` processes; all of them pass, and none is left out. Returns what they printed."""
    options = ["-x", "-q", "--color=no", "-p", "no:cacheprovider"]
    results = run(["-m", "pytest", *options, *files], n=n, env={"TESTS_WORLD": kind}, timeout=LIMIT)
    for result in results:
        assert re.search(r"\d+ passed", result.stdout), result
        assert "skipped" not in result.stdout, result
    return [result.stdout for result in results]


@pytest.mark.parametrize(
    ("processes", "kind"),
    [(2, "jax jax-uneven"), pytest.param(3, "jax jax-uneven", marks=pytest.mark.long)],
)
def test_the_suite_on_processes(processes, kind):
    for printed in run_suite(kind, processes, SUITE):
        assert int(re.search(r"(\d+) passed", printed)[1]) >= 35 * len(kind.split()), printed
