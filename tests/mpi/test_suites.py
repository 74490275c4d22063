"""Test files that also run in one process, on the ranks of an mpirun and on processes that `jax.distributed` joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_suite

COVERS = (
    "collectives/worlds/reducing/receive_buffers.py",
    "collectives/worlds/transport/jax_channel.py",
    "collectives/worlds/transport/mpi_channel.py",
    "collectives/worlds/transport/mpi_transport.py",
    "collectives/worlds/transport/transport.py",
)

pytestmark = pytest.mark.ranks
long = pytest.mark.long

TESTS = Path(__file__).parents[1]
WORLDS, MEETINGS = TESTS / "collectives" / "test_worlds.py", TESTS / "mpi" / "test_meetings.py"
ON_RANKS, FOOLING = TESTS / "mpi" / "test_on_ranks.py", TESTS / "fooling" / "test_drivers.py"
MATHEMATICS, *PROGRAMS = (
    TESTS / "program" / f"test_{name}.py"
    for name in (
        "same_mathematics",
        "trace",
        "own_collectives",
        "not_finite",
        "hyperparameters",
        "bad_input",
    )
)
OF_MPI = "not do_not_share_their_buffers and not with_a_world_each"  # its buffers, and its communicators


@pytest.mark.parametrize(
    ("n", "kinds", "files"),
    [
        (2, "mpi-uneven", [WORLDS]),
        pytest.param(3, "mpi mpi-two-devices", [WORLDS], marks=long),
        pytest.param(3, "mpi", [MATHEMATICS], marks=long),
        pytest.param(2, "mpi", PROGRAMS, marks=long),
        pytest.param(2, "mpi", [FOOLING], marks=long),
        pytest.param(2, "mpi-two-devices", [MATHEMATICS, MEETINGS, *PROGRAMS[:3]], marks=long),
    ],
    ids=["worlds", "worlds of three", "mathematics", "programs", "fooling", "two devices"],
)
def test_on_ranks(n, kinds, files):
    assert run_suite(files, n, kinds) >= 6


@pytest.mark.parametrize(
    ("n", "kinds", "files"),
    [
        pytest.param(2, "jax-uneven", [WORLDS], marks=long),
        pytest.param(3, "jax jax-uneven", [WORLDS, MEETINGS], marks=long),
        pytest.param(2, "jax", [MEETINGS, ON_RANKS, MATHEMATICS], marks=long),
        pytest.param(2, "jax", PROGRAMS, marks=long),
        pytest.param(2, "jax-two-devices", [MEETINGS, *PROGRAMS[1:3]], marks=long),
    ],
    ids=["worlds", "worlds of three", "meetings and mathematics", "programs", "two devices"],
)
def test_on_processes_that_jax_joins(n, kinds, files):
    assert run_suite(files, n, kinds, "-k", OF_MPI, jax=True) >= 8
