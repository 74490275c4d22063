"""The elastic example: workers join by the noise scale; rank 0 is killed, another one stopped, and one continues."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.mpirun import ROOT, run, survives_losses
from tests.speed import limit

pytestmark = pytest.mark.ranks

SCRIPT = ROOT / "examples" / "elastic.py"
EPOCHS = 8
# The noise scale of this model is always above 40 examples, so it calls for all workers from the first look on.
BRIEF = ["--epochs", str(EPOCHS), "--examples-per-worker", "8", "--every", "10"]


def rows(printed: str) -> list[tuple[int, list[str], int]]:
    """Step, worker of each slot, and global batch, of each line of the table."""
    found = re.findall(r"^ +(\d+) +\d+ +\d+   ([\d+ -]+) = (\d+)$", printed, re.MULTILINE)
    return [(int(step), worker_slots.split(" + "), int(batch)) for step, worker_slots, batch in found]


def check_table(printed: str, worker_slots: int) -> list[tuple[int, list[str], int]]:
    table = rows(printed)
    assert all(len(there) == worker_slots for _, there, _ in table), printed
    assert all(sum(int(size) for size in there if size != "-") == batch for _, there, batch in table), printed
    accuracy, epochs = re.search(r"test accuracy +([\d.]+)% after \d+ steps, (\d+) epochs", printed).groups()  # type: ignore[union-attr]
    assert float(accuracy) > 80, printed
    assert int(epochs) == EPOCHS, printed
    return table


@pytest.mark.long
@survives_losses
def test_rank_0_killed_and_another_one_stopped():
    harm = ["--workers", "3", "--kill", "0@15", "--stop", "1@25", "--hang-timeout", f"{limit(2.5):.1f}"]
    result = run([SCRIPT, *BRIEF, *harm], n=3, ours=True, options=["--oversubscribe"])
    pids = re.findall(r"^worker \d is process (\d+)$", result.stdout, re.MULTILINE)
    assert len(pids) == 3, str(result)
    table = check_table(result.stdout, worker_slots=3)
    there = {step: (worker_slots, batch) for step, worker_slots, batch in table}
    assert there[1] == (["8", "8", "8"], 24), str(result)
    assert there[16] == (["-", "12", "12"], 24), str(result)  # the batch stays, until the hook looks at the noise again
    assert there[26][0] in (["-", "-", "16"], ["-", "-", "24"]), str(result)  # smaller by now, if that was prepared
    assert table[-1][1:] == (["-", "-", "8"], 8), str(result)
    lost = re.findall(r"worker (\d) lost: rank 0 \(pid (\d+) on \S+\) disconnected in .* of step (\d+)", result.stdout)
    assert lost == [("0", pids[0], "16"), ("1", pids[1], "26")], str(result)
    assert re.search(rf"pid {pids[1]} on \S+\) is stopped", result.stderr), str(result)
    assert "1 at the end; 2 processes lost" in result.stdout, str(result)


def alone(*arguments: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SCRIPT), *BRIEF, *arguments]
    if devices > 1:
        start = f"import jax, runpy, sys; jax.config.update('jax_num_cpu_devices', {devices}); sys.argv = sys.argv[1:]"
        path = f"sys.path.insert(0, {str(SCRIPT.parent)!r})"
        command[1:2] = ["-c", f"{start}; {path}; runpy.run_path(sys.argv[0], run_name='__main__')", str(SCRIPT)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit(100))


@pytest.mark.long
def test_on_the_devices_of_one_process():
    done = alone(devices=3)
    assert done.returncode == 0, done.stderr
    table = check_table(done.stdout, worker_slots=3)
    assert table[0] == (1, ["8", "-", "-"], 8)
    assert table[-1] == (table[-1][0], ["8", "8", "8"], 24)
    assert "a worker has joined in worker slot 2." in done.stdout


@pytest.mark.long
def test_as_one_worker():
    done = alone()
    assert done.returncode == 0, done.stderr
    assert check_table(done.stdout, worker_slots=1) == [(1, ["8"], 8)]
