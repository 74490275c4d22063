"""Examples can be copied out of the repository and run: each is a file by itself, and learns."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpirun import ROOT
from tests.speed import limit

EXAMPLES = ROOT / "examples"
PORTS = ["nnx", "language_model", "batch_norm"]  # test_ports.py runs them
ALONE = ["listing_1", "equinox_mlp", "resume", *PORTS]


def started(script: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A copy of an example, started where there is nothing else."""
    copy = folder / f"{script}.py"
    copy.write_text((EXAMPLES / copy.name).read_text())
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(copy), *options]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=limit(170))


def accuracy(done: subprocess.CompletedProcess[str]) -> float:
    assert done.returncode == 0, done.stderr
    return float(re.search(r"test accuracy +([\d.]+)%", done.stdout)[1])


@pytest.mark.parametrize("script", ALONE)
def test_they_import_packages_alone(script):
    tree = ast.parse((EXAMPLES / f"{script}.py").read_text())
    names = [
        n.module if isinstance(n, ast.ImportFrom) else n.names[0].name
        for n in ast.walk(tree)
        if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    beside = {path.stem for path in EXAMPLES.glob("*.py")}
    assert not {name for name in names if name.partition(".")[0] in beside}


@pytest.mark.long
def test_training_resumes_at_its_step(tmp_path):
    first = started("resume", tmp_path, "--epochs", "2")
    assert "begins in epoch 0, behind step 0, on 1 workers" in first.stdout, first.stderr
    steps = int(re.findall(r"epoch +2 +step +(\d+)", first.stdout)[0])
    second = started("resume", tmp_path, "--epochs", "4")
    assert f"begins in epoch 2, behind step {steps}, on 1 workers" in second.stdout, second.stderr
    assert accuracy(second) > 60


@pytest.mark.long
def test_training_that_is_killed_can_be_started_again(tmp_path):
    killed = started("resume", tmp_path, "--kill-after", "40")
    assert killed.returncode == -9
    assert accuracy(started("resume", tmp_path, "--epochs", "6")) > 60


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "options", "least"),
    [
        ("listing_1", ["--epochs", "3"], 85),
        ("equinox_mlp", ["--epochs", "8"], 85),
    ],
)
def test_they_learn(script, options, least, tmp_path):
    assert accuracy(started(script, tmp_path, *options)) > least
