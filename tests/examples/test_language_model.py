"""The language model, as a tiny one, copied out of the repository: by mpirun, and over devices."""

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

pytestmark = pytest.mark.ranks

TINY = "--steps 12 --layers 1 --width 16 --context 16 --global-batch 8 --max-batch 16 --show-every 4"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where nothing else of the examples is."""
    return Path(shutil.copy(ROOT / "examples" / "language_model.py", tmp_path))


def check(printed: str, workers: int) -> None:
    rows = re.findall(r"^ +(\d+) +([\d.]+) +[\d.]+ +[\d.]+   ([\d +]+) = (\d+)$", printed, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [4, 8, 12], printed
    for _, loss, sizes, batch in rows:
        assert 1 < float(loss) < 5  # at first ln(103): every character alike
        assert len(sizes.split(" + ")) == workers
        assert sum(map(int, sizes.split(" + "))) == int(batch)
    bits = float(re.search(r"^([\d.]+) bits a character", printed, re.MULTILINE)[1])  # type: ignore[index]
    assert 3 < bits < 6.7, printed
    assert len(printed.partition('The "for" statement ')[2]) > 300  # it has written something


@pytest.mark.long
def test_under_mpirun(script):
    check(run([script, *shlex.split(TINY)], n=2).stdout, workers=2)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_in_one_process(script, devices):
    command = [sys.executable, str(script), *shlex.split(TINY), "--devices", str(devices)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit(100))
    assert done.returncode == 0, done.stderr
    check(done.stdout, workers=devices)
