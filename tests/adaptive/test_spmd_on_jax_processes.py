"""Steps of several processes that `jax.distributed` joins, each as one program, and what becomes of a lost process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jaxrun import run

COVERS = ("adaptive/runtime/spmd_step.py", "collectives/worlds/jax_world.py")

pytestmark = pytest.mark.ranks

LIMIT = 200.0  # seconds: many tests in one launch
SUITE = Path(__file__).parent / "spmd_on_jax_processes.py"


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_suite_on_processes(processes):
    options = ["-x", "-q", "--color=no", "-p", "no:cacheprovider"]
    results = run(["-m", "pytest", *options, SUITE], n=processes, timeout=LIMIT)
    assert all(re.search(rf"{5 if processes == 1 else 7} passed", result.stdout) for result in results), results[0]


LOST = """
import os, signal, sys, time
from tests.jaxrun import join
from tests.speed import at_start
join()
import jax, numpy as np
import adaptive as ad, collectives as comm
from adaptive.runtime.spmd_step import SPMDStep
from tests.adaptive.runtime.test_spmd_step import built, plain

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

with comm.world(hang_timeout=3 * at_start(), devices=jax.local_devices()[:1]) as world:
    program = built(plain, world=world)
    for _ in range(4):
        program.step()
    if world.rank:
        match sys.argv[1]:
            case "before": killed()
            case "within": SPMDStep._run = killed
            case "stopped": SPMDStep._run = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        program.step()
    except ad.WorkerError as error:
        print(f"heard: {error}", *error.__notes__, flush=True)
        try:
            print("the state:", program.state["params"]["b"], flush=True)
        except ad.WorkerError as lost:
            print("the state:", lost, flush=True)
        raise
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "heard"),
    [
        ("before", r"rank 1 has closed its connection.*The state of .* is that of step 4(.|\n)*the state: [-0-9.]+\n"),
        ("within", r".*Gloo(.|\n)*The state of .* is lost with step 5(.|\n)*the state: .*program\.restore"),
    ],
)
def test_where_one_is_lost_the_others_hear_of_it_and_end(tmp_path, how, heard):
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    results = run([script, how], timeout=60, expect_failure=True)
    lost = "heard: rank 0 of 2 lost the connection to the others in step 5 of .* as one program: "
    assert re.search(lost + heard, results[0].stdout), results[0]
    assert results[0].returncode != 134, results[0]  # JAX's way to end whom it has waited for


@pytest.mark.long
def test_a_process_stopped_within_a_step_is_named_and_ended(tmp_path):
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    results = run([script, "stopped"], timeout=60, expect_failure=True)
    assert results[1].returncode == -9
    assert re.search(r"rank 1 \(.*is stopped", results[0].stderr), results[0]
