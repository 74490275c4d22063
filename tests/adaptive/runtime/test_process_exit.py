"""A process that ends while its compiler is at work waits for the current compile, and has the right status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import mpirun
from tests.speed import limit

pytestmark = pytest.mark.ranks
SCRIPT = Path(__file__).with_name("ending.py")
# In a cache the kernel would be found, were it ever compiled; a crash is recognized by its signal.
ENVIRONMENT = {"JAX_ENABLE_COMPILATION_CACHE": "0"}


@pytest.mark.parametrize(("how", "status"), [("end", 0), ("exit", 3)])
def test_a_process_ends_after_the_current_compile(how, status, tmp_path):
    paths = os.pathsep.join([str(mpirun.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), how, str(tmp_path / "compiled")],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=limit(150),
    )
    assert done.returncode == status, done.stderr
    assert done.stdout == "the last word"
    assert "terminate called" not in done.stderr
    assert (tmp_path / "compiled").exists()


def test_ranks_that_compile_end_too(tmp_path):
    marker = tmp_path / "compiled"
    job = mpirun.run([SCRIPT, "raise", marker], n=2, env=ENVIRONMENT, timeout=150, expect_failure=True)
    assert "finalize" not in job.stderr, job
    assert "terminate called" not in job.stderr, job
    assert "as it was to be" in job.stderr


def test_a_process_whose_step_over_devices_is_being_traced_ends_without_a_word():
    paths = os.pathsep.join([str(mpirun.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(SCRIPT.with_name("ending_on_devices.py"))],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=limit(150),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the last word, and a step", "")
