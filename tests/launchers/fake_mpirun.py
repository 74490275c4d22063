"""A launcher without MPI: starts N processes, and ends as FAKE_ENDS says after them."""

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
    if i == n - 1 and os.environ.get("FAKE_SPAWNED"):
        place = {**place, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_NAMESPACE": "spawned"}
        place["ADAPTIVE_SPAWNED"] = "1"
    elif os.environ.get("FAKE_SPAWNED"):
        place["OMPI_COMM_WORLD_SIZE"] = str(n - 1)
    ranks.append(subprocess.Popen(command, env={**os.environ, **place}, start_new_session=True))
codes = [rank.wait() for rank in ranks]
match os.environ.get("FAKE_ENDS", ""):
    case "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    case "hangs":
        signal.pause()
    case code:
        sys.exit(int(code or 0))
