"""The first step of a program ends after at most 1.3 times the time of a plain jitted loop (aimed at).

With a filled compilation cache, after at most 1.1 times (aimed at). Both from the start of the interpreter.

    python benchmarks/start.py [--rounds 3] [--ranks 1 2] [--models "perceptron 256" "conv net 64"] [--write]

Each start is a job of its own (`_start_run.py`). A round starts the hand-written loop and the driver in turn, each
twice: with an empty compilation cache of its own, and with the cache that the first start has filled. On one process
the loop is one jitted program; on several ranks it is a gradient, an Allreduce of mpi4py, and an update. Both make
model, data and optimizer state by the same code, with Adam of optax.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _measure import command_line, middle, report

ROOT = Path(__file__).resolve().parents[1]
RUN = str(ROOT / "benchmarks" / "_start_run.py")
WAYS, CACHES = ("by-hand", "driver"), ("empty", "filled")
PHASES = ("imports", "model", "building", "first step")
SECONDS = 300


class Start(NamedTuple):
    """What one job has measured in each phase.

    Attributes:
      seconds: of the slowest rank.
      cpu: processor seconds of all ranks.
      programs: compiled, or read from the cache, by the slowest rank after its model was made.
      compiling: seconds of the compiler for these; parallel compiles are added.
    """

    seconds: np.ndarray
    cpu: np.ndarray
    programs: int
    compiling: float


def start(way: str, model: str, ranks: int, cache: str) -> Start:
    name, _, local_batch = model.rpartition(" ")
    command = [sys.executable, *(["-m", "mpi4py"] if ranks > 1 else []), RUN, way, name, local_batch, str(ranks)]
    if ranks > 1:
        command = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "-n", str(ranks), *command]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "adaptive-start-pyc")}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "JAX_PLATFORMS": "cpu"}
    env |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    if ranks > 1:
        env["PJRT_NPROC"] = "1"  # as `make run` sets it: the ranks share the cores
    env["STARTED"] = repr(time.monotonic())
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(found) != ranks:
        raise RuntimeError(f"no first step: {command}\n{done.stdout}\n{done.stderr}")
    slowest = max(found, key=lambda rank: sum(rank["seconds"]))
    programs = slowest["programs"]
    cpu = np.sum([rank["cpu"] for rank in found], axis=0)
    return Start(np.array(slowest["seconds"]), cpu, len(programs), sum(seconds for _, seconds in programs))


def measured(model: str, ranks: int, rounds: int) -> dict[tuple[str, str], list[Start]]:
    """Return the starts of each way with each state of the cache, one per round."""
    found: dict[tuple[str, str], list[Start]] = {(way, cache): [] for cache in CACHES for way in WAYS}
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for cache in CACHES:
                for way in WAYS[:: -1 if number % 2 else 1]:
                    found[way, cache].append(start(way, model, ranks, f"{folder}/{way}"))
    return found


def rows_of(model: str, ranks: int, found: dict[tuple[str, str], list[Start]]) -> list[dict[str, Any]]:
    rows = []
    for (way, cache), starts in found.items():
        seconds, cpu = np.array([s.seconds for s in starts]), np.array([s.cpu for s in starts])
        hand = found["by-hand", cache]
        ratio = seconds.sum(1) / np.sum([s.seconds for s in hand], axis=1)
        ratio_of_cpu = cpu.sum(1) / np.sum([s.cpu for s in hand], axis=1)
        phases = zip(PHASES, np.median(seconds, axis=0), np.median(cpu, axis=0), strict=True)
        rows.append(
            {
                "": f"{model}, {ranks} process{'es' * (ranks > 1)}, cache {cache}, {way}",
                **{phase: f"{wall:.2f} ({busy:.2f})" for phase, wall, busy in phases},
                "all": f"{np.median(seconds.sum(1)):.2f} ({np.median(cpu.sum(1)):.2f})",
                "programs": starts[0].programs,
                "compiler": f"{np.median([s.compiling for s in starts]):.2f}",
                "ratio": middle(ratio),
                "ratio of processor time": middle(ratio_of_cpu),
            }
        )
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--models", nargs="*", default=["perceptron 256", "conv net 64"], help="name and local batch")
    asked = parser.parse_args()
    rows = []
    start("driver", asked.models[0], 1, tempfile.mkdtemp())  # byte code, and the file system's cache
    for model in asked.models:
        for ranks in asked.ranks:
            rows += rows_of(model, ranks, measured(model, ranks, asked.rounds))
    notes = [
        f"Medians of {asked.rounds} rounds, in seconds of the slowest rank, and in brackets of processor time of all "
        "ranks; from the launch of the interpreter, or of mpirun. Ratios are paired, with the least and the most. "
        "*Programs*: compiled or read from the cache by a rank after its model is made; *compiler*: seconds that this "
        "took, those side by side added.",
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f}, of {os.cpu_count()} cores.",
    ]
    title = "From the start of the interpreter to the end of the first step"
    report(title, rows, "start.md" if asked.write else None, notes)


if __name__ == "__main__":
    main()
