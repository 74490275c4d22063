"""A launcher without MPI, for jobs of real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def fake_mpirun(tmp_path) -> str:
    """Return the path of a launcher that calls itself Open MPI's: `fake_mpirun.py`."""
    path = tmp_path / "mpirun"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_mpirun.py")} "$@"\n')
    path.chmod(0o755)
    return str(path)
