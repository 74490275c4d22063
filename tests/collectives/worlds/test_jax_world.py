"""The suite on processes that jax.distributed joins, and what becomes of them when one is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jaxrun import HEARTBEAT, reserved_address, run
from tests.mpirun import run as mpirun

COVERS = ("collectives/worlds/transport/jax_channel.py",)

LIMIT = 200.0  # seconds: many tests in one launch
pytestmark = pytest.mark.ranks

HERE = Path(__file__).parents[1]
MPI, PROGRAM = HERE.parent / "mpi", HERE.parent / "program"
SUITE, ALONE, MEETINGS, ON_RANKS = (
    HERE / "test_worlds.py",
    HERE / "on_jax_processes.py",
    MPI / "meetings.py",
    MPI / "on_ranks.py",
)
OF_MPI = "not do_not_share_their_buffers and not with_a_world_each"  # its buffers, and its communicators


def run_suite(kind: str, n: int, *files: Path, short: bool = False) -> int:
    """Run test files on `n` processes; all of them pass, and none is left out, but for long ones where it is to be
    short. Returns how many tests there were.
    """
    options = [*(["-m", "not long"] if short else []), "-x", "-q", "--color=no", "-p", "no:cacheprovider", "-k", OF_MPI]
    results = run(["-m", "pytest", *options, *files], n=n, env={"TESTS_WORLD": kind}, timeout=LIMIT)
    passed = [re.search(r"(\d+) passed", result.stdout) for result in results]
    assert all("skipped" not in result.stdout for result in results), results[0]
    assert len({match and match[1] for match in passed}) == 1, results[0]
    return int(passed[0][1])


@pytest.mark.parametrize(
    ("processes", "kind"),
    [
        (2, "jax-uneven"),
        pytest.param(2, "jax", marks=pytest.mark.long),
        pytest.param(3, "jax jax-uneven", marks=pytest.mark.long),
    ],
)
def test_the_suite_on_processes(processes, kind):
    assert run_suite(kind, processes, SUITE, ALONE, MEETINGS, short=kind == "jax-uneven") >= 35 * len(kind.split()) + 40


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "kind", "files"),
    [
        (2, "jax", [ON_RANKS, PROGRAM / "test_same_mathematics.py"]),
        (2, "jax", [PROGRAM / f"test_{name}.py" for name in ("bad_input", "not_finite", "trace", "hyperparameters")]),
        (2, "jax-two-devices", [MEETINGS, *(PROGRAM / f"test_{name}.py" for name in ("federated", "own_collectives"))]),
        (3, "jax", [PROGRAM / "test_same_mathematics.py"]),
    ],
    ids=["errors and mathematics", "programs", "two devices", "three processes"],
)
def test_programs(processes, kind, files):
    assert run_suite(kind, processes, *files) >= 8


# --- one is lost ------------------------------------------------------------------------------------------------------

LOST = """
import os, signal, sys, time
from tests.jaxrun import join
from tests.speed import at_start
join()
import jax, numpy as np
import adaptive as ad, collectives as comm
from collectives.worlds.reducing.sharded import Sharded

how, lost = sys.argv[1], int(sys.argv[2])
with comm.world(hang_timeout=3 * at_start()) as world:  # the same on all
    comm.all_reduce(np.ones(1000, np.float32), op="sum")
    if world.rank == lost:
        match how:
            case "killed": os.kill(os.getpid(), signal.SIGKILL)
            case "killed in a message": Sharded.reduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            case "stopped": os.kill(os.getpid(), signal.SIGSTOP)
            case "over": sys.exit(3)
            case "raises": raise ZeroDivisionError
    start = time.monotonic()
    try:
        comm.all_reduce(np.ones(1000, np.float32), op="sum")
    except ad.WorkerError as error:
        print(f"heard after {time.monotonic() - start:.1f} s: {error}", flush=True)
        raise
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "lost.py"
    path.write_text(LOST)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "lost", "n", "heard"),
    [
        (
            "killed",
            1,
            2,
            "rank 0 of 2 lost the connection to the others in all_reduce.*: rank 1 has closed its connection",
        ),
        (
            "killed",
            2,
            3,
            r"rank \d of 3 lost the connection to the others in all_reduce.*: rank \d has closed its connection",
        ),
        ("killed in a message", 1, 2, "rank 0 of 2 lost the connection to the others in all_reduce.*Gloo"),
        ("over", 1, 2, "rank 1 failed in its JaxWorld's block: SystemExit: 3"),
        ("raises", 0, 2, "rank 0 failed in its JaxWorld's block: ZeroDivision"),
    ],
)
def test_where_one_is_lost_the_others_hear_of_it_and_end(script, how, lost, n, heard):
    results = run([script, how, str(lost)], n=n, timeout=60, expect_failure=True)
    for rank, result in enumerate(results):
        assert rank == lost or re.search(f"heard after .*{heard}", result.stdout), result
        assert result.returncode != 134, result  # JAX's way to end whom it has waited for


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_stopped_process_is_named_and_ended_after_twice_the_timeout(script, lost):
    results = run([script, "stopped", str(lost)], timeout=60, expect_failure=True)
    assert results[lost].returncode == -9
    assert re.search(rf"rank {lost} \(.*is stopped", results[1 - lost].stderr), results[1 - lost]


@pytest.mark.long
def test_without_the_coordinator_jax_ends_all(script):
    results = run([script, "killed", "0"], timeout=HEARTBEAT + 50, expect_failure=True)
    assert [result.returncode for result in results] in ([-9, -6], [-9, 1])  # by JAX, or, where it is sooner, by us


# --- beside MPI -------------------------------------------------------------------------------------------------------

UNDER_MPIRUN = """
import sys
import jax
if "joined" in sys.argv:
    import os
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    jax.distributed.initialize(sys.argv[2], 2, rank, cluster_detection_method="deactivate")
import collectives as comm
with comm.world() as world:
    print(type(world).__name__, float(comm.all_reduce(1.0, op="sum")), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(("joined", "world"), [(True, "JaxWorld"), (False, "MPIWorld")])
def test_under_mpirun_an_initialized_jax_distributed_takes_precedence(tmp_path, joined, world):
    path = tmp_path / "under.py"
    path.write_text(UNDER_MPIRUN)
    with reserved_address() as address:
        done = mpirun([path, *(["joined", address] if joined else [])], n=2)
    assert done.stdout.count(f"{world} 2.0") == 2, done
