"""From launch to the first line that says what is going on (aimed at: 3 s), and to the first step (aimed at: 1.6 times
that of a plain jitted loop of the same model).

    python benchmarks/start.py [rounds]

`examples/listing_1.py` on two ranks, and `_plain_start.py`, in one process, take turns; each start is a job of its own.
Ours is started twice: with nothing compiled before, and once more with what the first start has left in the
compilation cache, as it is on every later day.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _measure import report

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
PYTHON = [sys.executable]
MPIRUN = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe", "-n", str(RANKS), *PYTHON, "-m", "mpi4py"]
SECONDS = 120


def start(command, cache):
    """Seconds to the first line of a job, and to that of its first step."""
    env = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if "mpi4py" in command:
        env["PJRT_NPROC"] = "1"  # as `make run` has it: the ranks share the cores
    began, first = time.monotonic(), None
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        for line in job.stdout:
            first = first or time.monotonic() - began
            if "step 1 " in line or "step 1/" in line:
                return first, time.monotonic() - began
            if time.monotonic() - began > SECONDS:
                break
    finally:
        os.killpg(job.pid, signal.SIGTERM)  # mpirun ends its ranks
        job.stdout.close()
        job.wait()
    raise RuntimeError(f"no first step: {command}")


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    ours, plain = [*MPIRUN, str(ROOT / "examples/listing_1.py")], [*PYTHON, str(ROOT / "benchmarks/_plain_start.py")]
    names = ["a plain jitted loop, one process", "two ranks, nothing compiled before", "two ranks, started before"]
    found = {name: [] for name in names}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for name, command in zip(names, (plain, ours, ours), strict=True):
                found[name].append(start(command, cache))
    base = np.array(found[names[0]])[:, 1]
    rows = []
    for name in names:
        first, step = np.array(found[name]).T
        rows.append(
            {
                "": name,
                "first line": f"{np.median(first):.1f} s" if name != names[0] else "",
                "first step": f"{np.median(step):.1f} s ({step.min():.1f} – {step.max():.1f})",
                "of the plain loop's": "{1:.2f} ({0:.2f} – {2:.2f})".format(*np.quantile(step / base, [0, 0.5, 1])),
            }
        )
    lowest = min(os.getloadavg())
    report(
        "From launch to the first line, and to the first step",
        rows,
        "start.md",
        [
            f"Medians of {rounds} rounds, in turn, with the least and the most. The load of the machine was "
            f"{lowest:.1f} at least, of {os.cpu_count()} cores.",
        ],
    )


if __name__ == "__main__":
    main()
