"""A rank that reports as one with MPI does: `rank_without_mpi.py FOLDER PHASE WAY`; see test_job.py.

The last rank ends in this way in this phase. The others do what MPI would have them do: in the making of a world they
wait for all, without end; in a world a process that was killed, or has left, is lost, and everybody else is waited for.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

from launchers import ending

FOLDER, PHASE, WAY = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
RANK, SIZE = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
SPAWNED = ending.SPAWNED in os.environ
ENDS = SPAWNED or (RANK == SIZE - 1 and "FAKE_SPAWNED" not in os.environ)
IS_LOST = WAY in ("SIGKILL", "SIGSEGV", "os._exit(0)", "leaves")


def at(phase: str) -> None:
    if ENDS and phase == PHASE:
        end()


def end() -> None:
    match WAY:
        case "os._exit(0)" | "os._exit(3)":
            os._exit(int(WAY[9]))
        case "sys.exit(0)" | "sys.exit(3)":
            sys.exit(int(WAY[9]))
        case "raises":
            raise ImportError("No module named 'mine'")
        case "leaves":
            ending.leave_job()
        case _:
            if WAY != "SIGKILL":
                signal.signal(signal.Signals[WAY], signal.SIG_DFL)  # without what the tests' environment has set up
            os.kill(os.getpid(), signal.Signals[WAY])


def meet(name: str, wait_for: int = SIZE) -> None:
    """Wait for others to come here."""
    (FOLDER / f"{name}{RANK}").touch()
    while len(list(FOLDER.glob(f"{name}*"))) < wait_for:
        time.sleep(0.002)


def world(name: str, phase: str, inside: str) -> None:
    with ending.making_world(of_all=True):
        meet(f"{name} begins ")
        at(phase)
        meet(f"{name} is made ")
        ending.world_made()
    at(inside)
    meet(f"{name} ends ", SIZE - (inside == PHASE and IS_LOST))
    ending.world_ended()


at("import")
if SPAWNED:
    ending.world_made()
    at("spawned")
    signal.pause()  # it waits to be let in
world("first", "making", "world")
at("after")
if PHASE in ("between", "making another"):
    at("between")
    world("second", "making another", "another world")
atexit.register(at, "exit")
print("ended well", flush=True)
