"""The suite of tests/program, on the ranks of an mpirun: the same tests, over other worlds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpirun import run

COVERS = (
    "collectives/worlds/reducing/receive_buffers.py",
    "collectives/worlds/transport/mpi_channel.py",
    "collectives/worlds/transport/mpi_transport.py",
    "collectives/worlds/transport/transport.py",
)

LIMIT = 200.0  # seconds: many tests in one launch
pytestmark = pytest.mark.ranks

HERE = Path(__file__).parent
PROGRAM, FOOLING = HERE.parent / "program", HERE.parent / "fooling"
MATHEMATICS, TRACE, MEETINGS = (
    PROGRAM / "test_same_mathematics.py",
    PROGRAM / "test_trace.py",
    HERE / "meetings.py",
)
SET = PROGRAM / "test_hyperparameters.py"


def run_suite(kind: str, n: int, *files: Path | str) -> str:
    """Run test files on `n` ranks; all of them pass, and none is left out. Returns what they printed."""
    options = ["-x", "-q", "--color=no", "-p", "no:cacheprovider"]
    result = run(["-m", "pytest", *options, *files], n=n, env={"TESTS_WORLD": kind}, timeout=LIMIT)
    assert len(re.findall(r"\d+ passed", result.stdout)) == n, result
    assert "skipped" not in result.stdout, result
    return result.stdout


@pytest.mark.parametrize(
    ("ranks", "kind", "files"),
    [  # launches: each takes a while before its first test
        (2, "mpi", [MATHEMATICS]),
        pytest.param(2, "mpi", [FOOLING / "test_drivers.py"], marks=pytest.mark.long),
        (2, "mpi", [PROGRAM / "test_bad_input.py", HERE / "on_ranks.py", MEETINGS]),
        pytest.param(2, "mpi", [PROGRAM / "test_not_finite.py", TRACE, SET], marks=pytest.mark.long),
        pytest.param(
            2,
            "mpi-two-devices",
            [MATHEMATICS, MEETINGS, TRACE, PROGRAM / "test_federated.py", PROGRAM / "test_own_collectives.py"],
            marks=pytest.mark.long,
        ),
        pytest.param(3, "mpi", [MATHEMATICS], marks=pytest.mark.long),
    ],
    ids=["mathematics", "fooling", "errors", "more errors", "two devices", "three ranks"],
)
def test_programs(ranks, kind, files, capsys):
    printed = run_suite(kind, ranks, *files)
    with capsys.disabled():
        print("".join("\n" + line for line in printed.splitlines() if "off plain optax" in line))
