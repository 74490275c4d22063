"""Processes that are killed while they start, at any point: the job ends, as documented, and names the process."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.mpirun import Result, run, survives_losses

COVERS = ("collectives/worlds/launch.py",)

pytestmark = [pytest.mark.ranks, survives_losses]

SCRIPT = Path(__file__).parent / "starting.py"
MOST = {"import": 2500, "MPI_Init": 1000, "world": 360, "spawning": 3000}  # until then something is under way
LAUNCHED = ["--oversubscribe", "--bind-to", "none"]


def number(phase: str, seed: int) -> int:
    return random.Random(seed).randrange(1, MOST[phase])


def start(who: str, phase: str, seed: int, folder: Path, *, n: int) -> Result:
    """Run a job in which a process is killed; return how it ended, by itself."""
    arguments = [SCRIPT, who, phase, str(number(phase, seed)), folder / "killed"]
    result = run(arguments, n=n, ours=True, options=LAUNCHED, expect_failure=None)
    print(result)
    return result


@pytest.mark.parametrize(
    ("phase", "seed"),
    [
        ("world", 1),
        *(pytest.param("import", seed, marks=pytest.mark.long) for seed in range(1, 4)),
        *(pytest.param("MPI_Init", seed, marks=pytest.mark.long) for seed in range(1, 4)),
        *(pytest.param("world", seed, marks=pytest.mark.long) for seed in range(2, 6)),
    ],
)
def test_a_rank_is_killed_before_its_world_is_made(phase, seed, tmp_path):
    """If the rank has built its world by then, the others continue; else the job ends because of it."""
    result = start(str(seed % 3), phase, seed, tmp_path, n=3)
    assert (tmp_path / "killed").exists(), result
    if result.returncode == 0:
        assert result.stdout.count("ended well") >= 2, result
        return
    assert "ended well" not in result.stdout, result
    if result.returncode == 137:
        assert re.search(rf"rank {seed % 3} .* was killed by SIGKILL before its first world", result.stderr), result
    else:  # it had made its world, and the others had not
        assert result.returncode == 1, result
        assert re.search("WorkerError: .*during comm.world|comm.world.* failed", result.stderr), result


@pytest.mark.long
@pytest.mark.parametrize(
    ("who", "phase", "seed"),
    [
        *(("0", "spawning", seed) for seed in range(1, 5)),
        *(("spawned", "import", seed) for seed in range(1, 3)),
        *(("spawned", "MPI_Init", seed) for seed in range(1, 4)),
        *(("spawned", "world", seed) for seed in range(1, 4)),
    ],
)
def test_a_process_is_killed_while_another_is_spawned(who, phase, seed, tmp_path):
    """Training ranks end well, whatever happens to the others and to mpirun."""
    result = start(who, phase, seed, tmp_path, n=2)
    assert (tmp_path / "killed").exists(), result
    assert result.returncode == 0, result
    assert result.stdout.count("ended well") >= (1 if who == "0" else 2), result
