"""A process ends when it is to, with the right status, whatever its compiler is at."""

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
STATUS = {"end": 0, "raise": 1, "exit": 3, "close": 0}


def ended(how, marker, *options):
    paths = os.pathsep.join([str(mpirun.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), how, str(marker), *options],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=limit(150),
    )
    assert done.returncode == STATUS[how], done.stderr
    assert done.stdout == "the last word"
    assert ("ValueError: as it was to be" in done.stderr) == (how == "raise")
    assert "terminate called" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the compiler is waited for")
@pytest.mark.parametrize("how", STATUS)
def test_a_process_ends_before_a_kernel_is_compiled(how, tmp_path):
    ended(how, tmp_path / "compiled")
    assert not (tmp_path / "compiled").exists()


@pytest.mark.parametrize("how", ["end", pytest.param("exit", marks=pytest.mark.long)])
def test_a_kernel_that_is_compiled_while_the_process_ends_does_no_harm(how, tmp_path):
    """A thread that returns to an interpreter that is shutting down would abort the process."""
    ended(how, tmp_path / "compiled", "short", "late")


@pytest.mark.long
def test_a_thread_that_cannot_be_abandoned_is_joined(tmp_path):
    ended("exit", tmp_path / "compiled", "short", "elsewhere")
    assert (tmp_path / "compiled").exists()


@pytest.mark.parametrize("how", [pytest.param("end", marks=pytest.mark.long), "raise"])
def test_ranks_end_before_their_kernels_are_compiled(how, tmp_path):
    marker = tmp_path / "compiled"
    job = mpirun.run([SCRIPT, how, marker], n=2, env=ENVIRONMENT, timeout=150, expect_failure=how == "raise")
    assert not marker.exists(), job
    assert "finalize" not in job.stderr, job
    assert "terminate called" not in job.stderr, job
    assert ("as it was to be" in job.stderr) == (how == "raise")
