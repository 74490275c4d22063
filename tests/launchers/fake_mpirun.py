"""A launcher without MPI: starts N processes, and ends with 0 after them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

if "--version" in sys.argv:
    print("mpirun (Open MPI) 5.0.11")
    sys.exit()

n = int(sys.argv[sys.argv.index("-n") + 1])
command = sys.argv[sys.argv.index("--begin") + 1 :]
ranks: list[subprocess.Popen] = []


def end(number: int, frame: FrameType | None) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGTERM)
    for rank in ranks:
        rank.wait()
    sys.exit(128 + number)


signal.signal(signal.SIGTERM, end)
for i in range(n):
    place = {"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_SIZE": str(n), "PMIX_NAMESPACE": "job"}
    ranks.append(subprocess.Popen(command, env={**os.environ, **place}, start_new_session=True))
for rank in ranks:
    rank.wait()
