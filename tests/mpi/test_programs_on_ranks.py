"""The suite of tests/program, on the ranks of an mpirun: the same tests, over other worlds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpirun import run

PROGRAM = Path(__file__).parents[1] / "program"
LEAST = {"mpi": 2}


def run_suite(kind: str, n: int, *files: Path) -> str:
    """Run test files on `n` ranks; all of them pass, and none is left out. Returns what they printed."""
    options = ["-x", "-q", "--color=no", "-p", "no:cacheprovider"]
    result = run(["-m", "pytest", *options, *files], n=n, env={"TESTS_WORLD": kind}, timeout=100)
    assert len(re.findall(r"\d+ passed in", result.stdout)) == n, result
    assert "skipped" not in result.stdout, result
    return result.stdout


@pytest.mark.parametrize(("ranks", "kind"), [(2, "mpi"), (3, "mpi"), (2, "mpi-two-devices")])
def test_the_same_mathematics(ranks, kind, capsys):
    printed = run_suite(kind, ranks, PROGRAM / "test_same_mathematics.py")
    with capsys.disabled():
        print("\n" + "\n".join(line for line in printed.splitlines() if "off plain optax" in line))


def test_bad_input():
    run_suite("mpi", 2, PROGRAM / "test_bad_input.py", Path(__file__).parent / "on_ranks.py")


def test_fooling():
    run_suite("mpi", 2, Path(__file__).parents[1] / "fooling" / "test_drivers.py")


@pytest.mark.parametrize(("ranks", "kind"), [(2, "mpi"), (2, "mpi-two-devices")])
def test_ranks_that_are_in_different_places(ranks, kind):
    run_suite(kind, ranks, Path(__file__).parent / "meetings.py")


def test_what_is_not_finite():
    run_suite("mpi", 2, PROGRAM / "test_not_finite.py")


def test_federated_rounds_and_collectives_of_ones_own():
    run_suite("mpi-two-devices", 2, PROGRAM / "test_federated.py", PROGRAM / "test_own_collectives.py")
