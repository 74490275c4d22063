"""Survivable losses (Open MPI's ULFM) cost a step of 5 ms less than 2 % as long as nothing is lost.

    python benchmarks/what_ulfm_costs.py

ULFM is a setting of the whole job, so each setting is a job of its own: two ranks on one host, several jobs each in
turn. Exchanges are those of a program, by `MPIWorld.exchange`: 4 kB, 4 MB, and 97.6 MiB (ResNet-50's gradients) as one
part. A step of 5 ms is a computation of that duration, by the clock, and an exchange of 4 MB. Reported is the time of
the slower rank, as the median of each job.

`--rank` runs the part of each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from _measure import alternate, pin, report, summary

from adaptive.base.channel import SentMessage

BYTES = {"4 kB": 4 << 10, "4 MB": 4 << 20, "97.6 MiB": int(97.6 * 2**20) // 4 * 4}
STEP_SECONDS = 5e-3
STEP = "a step of 5 ms with 4 MB"
HAN = "OMPI_MCA_coll"
SETTINGS: dict[str, tuple[list[str], Mapping[str, str]]] = {
    "Open MPI defaults": ([], {}),
    "without han": ([], {HAN: "^han"}),
    "survives losses: ULFM, without han": (["--with-ft", "ulfm"], {HAN: "^han"}),
}


def rank(rounds: int) -> None:
    """Time the exchanges on this rank; rank 0 prints its medians."""
    import jax.numpy as jnp
    from mpi4py import MPI

    import collectives as comm

    pin(sorted(os.sched_getaffinity(0))[MPI.COMM_WORLD.rank % len(os.sched_getaffinity(0))])
    nothing = np.zeros(0, np.float32)
    with comm.MPIWorld() as world:

        def exchange(size: int) -> Callable[[], None]:
            parts = [jnp.ones(size // 4, jnp.float32)]

            def run() -> None:
                world.exchange(SentMessage([parts], nothing), ["sum"])
                MPI.COMM_WORLD.Barrier()  # so the next starts on both ranks at once

            return run

        send = exchange(BYTES["4 MB"])

        def step() -> None:
            until = time.perf_counter() + STEP_SECONDS
            while time.perf_counter() < until:
                pass
            send()

        for name, way in {**{name: exchange(size) for name, size in BYTES.items()}, STEP: step}.items():
            own = alternate({name: way}, rounds)[name]
            slower = np.max(MPI.COMM_WORLD.allgather(own), axis=0)
            if world.rank == 0:
                print(json.dumps([name, float(np.median(slower))]), flush=True)


def job(options: list[str], environ: Mapping[str, str], rounds: int) -> dict[str, float]:
    """Start two ranks, and return their medians by name, in seconds."""
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = [str(beside) if beside.exists() else "mpirun", *options, "-n", "2", "--oversubscribe", "--bind-to", "none"]
    command = [*mpirun, sys.executable, "-m", "mpi4py", __file__, "--rank", "--rounds", str(rounds)]
    inherited = {name: value for name, value in os.environ.items() if name != HAN}
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env={**inherited, **environ})
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", action="store_true")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=5, help="of each setting")
    args = parser.parse_args()
    if args.rank:
        rank(args.rounds)
        return
    names = list(SETTINGS)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(args.jobs):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            found[name].append(job(*SETTINGS[name], args.rounds))
    rows: list[dict[str, str]] = []
    for what in [*BYTES, STEP]:
        medians = {name: [times[what] for times in found[name]] for name in names}
        rows += [{"what": what, **row.cells()} for row in summary(medians, "without han")]
    notes = [
        f"Two ranks on one host, {args.jobs} jobs of each setting in turn, {args.rounds} rounds in each. Seconds are "
        "medians of jobs, ratios are to Open MPI without han."
    ]
    report("What ULFM costs while nothing is lost", rows, "what_ulfm_costs.md", notes)


if __name__ == "__main__":
    main()
