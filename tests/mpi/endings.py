"""Jobs that end in many ways: `adaptive run -n 3 endings.py CASE:RANK …`; see test_endings.py.

Each rank that is named does what its case says, half way through. The others go on if they can.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import psutil

from launchers import ending

CASES = {int(rank): case for case, _, rank in (argument.partition(":") for argument in sys.argv[1:]) if rank}
received: list[int] = []


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_way(case: str, world: comm.MPIWorld) -> None:
    match case:
        case "killed":
            die()
        case "raises":
            raise OSError("no space left for a checkpoint")
        case "os._exit 3":
            os._exit(3)
        case "leaves":
            ending.leave_job()
        case "meets until its host is cut off":
            if os.path.exists(os.environ["ENDS_WELL"]):  # the job is started again
                return
            print(f"on {socket.gethostname()}", flush=True)
            while True:
                world.barrier()
        case "spawns one that is killed":
            code = "from mpi4py import MPI; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
            world.transport.mpi.COMM_SELF.Spawn(sys.executable, args=["-c", code])
        case "waits for a signal":
            signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
            signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
            print("waiting", flush=True)
            while not received:
                time.sleep(0.01)
            print(f"received {signal.Signals(received[0]).name}", flush=True)


def before_its_world(case: str) -> None:
    match case:
        case "killed in its import":
            die()


before_its_world(CASES.get(int(os.environ["OMPI_COMM_WORLD_RANK"]), ""))
import collectives as comm  # noqa: E402

with comm.world() as world:
    case, first = CASES.get(world.rank, ""), world.transport.comm.bcast(os.getpid())
    for step in range(20):
        if step == 10:
            half_way(case, world)
        world.barrier()
    print(f"the world of rank {world.rank} of {world.processes} ended well", flush=True)
match case:
    case "killed behind its world":
        die()
    case "exit 4 in the end":
        sys.exit(4)
    case "waits until rank 0 is gone":
        while psutil.pid_exists(first):
            time.sleep(0.01)
