"""Processes that `jax.distributed` joins, when one of them is lost; and beside MPI."""

from __future__ import annotations

import re

import pytest

from tests.jaxrun import HEARTBEAT, reserved_address, run
from tests.mpirun import run as mpirun

pytestmark = [pytest.mark.ranks, pytest.mark.long]


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


@pytest.mark.parametrize(
    ("how", "heard"),
    [
        ("killed", "rank 0 of 2 lost the connection to the others in all_reduce.*: rank 1 has closed its connection"),
        ("killed in a message", "rank 0 of 2 lost the connection to the others in all_reduce.*Gloo"),
        ("over", "rank 1 failed in its JaxWorld's block: SystemExit: 3"),
    ],
)
def test_where_one_is_lost_the_other_hears_of_it_and_ends(script, how, heard):
    result, _ = run([script, how, "1"], timeout=60, expect_failure=True)
    assert re.search(f"heard after .*{heard}", result.stdout), result
    assert result.returncode != 134, result  # JAX's way to end whom it has waited for


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stopped_process_is_named_and_ended_after_twice_the_timeout(script, lost):
    results = run([script, "stopped", str(lost)], timeout=60, expect_failure=True)
    assert results[lost].returncode == -9
    assert re.search(rf"rank {lost} \(.*is stopped", results[1 - lost].stderr), results[1 - lost]


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


@pytest.mark.parametrize(("joined", "world"), [(True, "JaxWorld"), (False, "MPIWorld")])
def test_under_mpirun_an_initialized_jax_distributed_takes_precedence(tmp_path, joined, world):
    path = tmp_path / "under.py"
    path.write_text(UNDER_MPIRUN)
    with reserved_address() as address:
        done = mpirun([path, *(["joined", address] if joined else [])], n=2)
    assert done.stdout.count(f"{world} 2.0") == 2, done
