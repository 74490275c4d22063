"""Jobs whose last ranks go ways of their own: `mpirun -n 3 python stuck_jobs.py PATIENCE|default block|bare WAY …`."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import adaptive as ad
import collectives as comm
from adaptive.base.process.thread_status import thread_status


def driver(state, batch):
    loss, grad = comm.all_reduce(jax.value_and_grad(lambda s: jnp.square(batch["x"] - s).mean())(state))
    return state - 0.1 * grad, {"loss": loss}


class Source:
    """Examples of which one rank cannot read those of its fourth step."""

    def __len__(self):
        return len(DATA["x"])

    def __getitem__(self, index):
        if MINE.startswith("hangs in a read") and STARTED:
            self.waits_for_the_disk()
        return {"x": DATA["x"][index]}

    def waits_for_the_disk(self):
        time.sleep(3600)


SLOW = 2.7  # times the hang_timeout: beyond the second deadline
RESTS = 7.0  # seconds: beyond the second deadline of a rank that is stopped
BUSY = 12  # so that the time without them is much less than the first deadline


def evaluated(state, batch):
    time.sleep(3600)


@thread_status("compiling", compiles=True)
def compiles_for_long() -> None:
    time.sleep(SLOW * PATIENCE)


@contextmanager
def without_a_core():
    """Share one core with many busy processes."""
    cores = os.sched_getaffinity(0)

    def pin(to: set[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), to)

    pin({max(cores)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
        pin(cores)


def goes_its_own_way(what: str, program: ad.Program) -> None:
    """What a rank does after step 3, while the others continue."""
    match what:
        case "hangs in a read" | "hangs in a read with a limit":
            STARTED.append(True)
        case "rests":
            time.sleep(RESTS)
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hangs in evaluate":
            program.evaluate(evaluated, DATA, batch=16)
        case "holds the lock":  # Python's, asleep
            mutex = ctypes.create_string_buffer(64)
            for _ in range(2):  # the second time it waits for ever, whatever signals arrive
                ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        case "gets no core":
            with without_a_core():
                until = time.monotonic() + SLOW * PATIENCE
                while time.monotonic() < until:
                    pass
        case "is slow":
            compiles_for_long()
        case "parent is stopped":
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(3600)
        case "parent is killed":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(3600)
        case "launcher is stopped":
            launcher = next(p for p in psutil.Process().parents() if "launchers.run" in p.cmdline())
            launcher.suspend()
            time.sleep(8.0)
            launcher.resume()
        case "sys.exit":
            sys.exit(0)
        case "raises":
            raise OSError("no space left")
        case "is in another world":
            OTHER.barrier()


DEFAULT = sys.argv[1] == "default"
PATIENCE, BLOCK = 0.0 if DEFAULT else float(sys.argv[1]), sys.argv[2] == "block"
BEFORE = 80 if DEFAULT else 3  # steps before all go their own ways
DATA = {"x": np.arange(64, dtype=np.float32)}
STARTED: list[bool] = []  # not empty: reads hang
logging.basicConfig(format="%(levelname)s of pid %(process)d: %(message)s", level=logging.INFO)
world = comm.world(hang_timeout=None if DEFAULT else PATIENCE)
OTHER = comm.MPIWorld(hang_timeout=0)
WAYS = dict(enumerate(sys.argv[3:], world.processes - len(sys.argv[3:])))  # of the last ranks
MINE = WAYS.get(world.rank, "")
print(f"rank {world.rank} pid {os.getpid()}", flush=True)
with world if BLOCK else nullcontext():
    reads = [way for way in WAYS.values() if "read" in way]
    read_timeout = 1.0 if "hangs in a read with a limit" in reads else 0
    data = ad.data.from_source(Source(), read_timeout=read_timeout) if reads else DATA
    program = ad.Program(driver, 0.0, data, global_batch=12, world=world, resizable=False)
    while program.steps < BEFORE + 5:
        program.step()
        if program.steps == BEFORE:
            goes_its_own_way(MINE, program)
    if MINE == "is slow":
        time.sleep(SLOW * PATIENCE)
    print(f"rank {world.rank} ended well", flush=True)
