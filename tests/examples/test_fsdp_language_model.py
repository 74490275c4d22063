"""The sharded language model: a job of two workers that are meshes, which continues from its checkpoint as one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpirun import ROOT, run
from tests.speed import limit

pytestmark = [pytest.mark.ranks, pytest.mark.long]

TINY = "--layers 1 --width 16 --context 16 --global-batch 16 --show-every 10"


def test_on_two_workers_and_then_on_one(tmp_path: Path):
    script = shutil.copy(ROOT / "examples" / "fsdp_language_model.py", tmp_path)
    options = [*shlex.split(TINY), "--checkpoints", str(tmp_path / "run")]
    printed = run([script, *options, "--steps", "50"], n=2).stdout
    assert "a mesh of 4 devices (fsdp=2, tp=2)" in printed
    assert "50" in re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+ +[\d.]+   \d+ \+ \d+$", printed, re.MULTILINE), printed
    command = [sys.executable, script, *options, "--steps", "10"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +60 +[\d.]+ +[\d.]+ +[\d.]+   16$", done.stdout, re.MULTILINE), done.stdout
    assert "by 'ema'" in done.stdout
