"""Jobs in which one rank does not come: `mpirun -n 3 python stuck_jobs.py CASE PATIENCE`; see test_stuck_jobs.py."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
from adaptive.extend import phase


def driver(state, batch):
    loss, grad = comm.all_reduce(jax.value_and_grad(lambda s: jnp.square(batch["x"] - s).mean())(state))
    return state - 0.1 * grad, {"loss": loss}


@phase("compiling", compiles=True)
def compiles_for_long() -> None:
    time.sleep(3 * PATIENCE)


def odd_one(program: ad.Program) -> None:
    """What the last rank does after step 3, while the others go on."""
    match CASE:
        case "sleeps":
            time.sleep(1000)
        case "loops":
            while True:
                pass
        case "is stopped" | "is resumed":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "holds the lock":  # Python's: this takes for ever, and nothing else runs meanwhile
            re.match(r"(a+)+$", "a" * 200 + "b")
        case "compiles":
            compiles_for_long()
        case "sys.exit":
            sys.exit(0)
        case "os._exit":
            os._exit(0)
        case "raises":
            raise OSError("no space left")
        case "raises alone":  # in a way that nobody else is told of
            raise ad.DisagreementError("as if all had it")
        case "evaluates":
            program.evaluate(lambda s, b: jnp.square(b["x"] - s).mean(), DATA)
        case "another world":
            OTHER.barrier()


class Resumes(logging.Handler):
    """Lets a stopped rank go on as soon as it is named."""

    def emit(self, record: logging.LogRecord) -> None:
        if named := re.search(r"kill -CONT (\d+)", record.getMessage()):
            os.kill(int(named[1]), signal.SIGCONT)


CASE, PATIENCE, BLOCK = sys.argv[1], float(sys.argv[2]), sys.argv[3:] == ["block"]
DATA = {"x": np.arange(64, dtype=np.float32)}
logging.basicConfig(format="%(levelname)s of pid %(process)d: %(message)s", level=logging.INFO)
world = comm.world(patience=PATIENCE)
OTHER = comm.MPIWorld(patience=0)
ODD = world.rank == world.processes - 1
print(f"rank {world.rank} pid {os.getpid()}", flush=True)
if CASE == "is resumed":
    logging.getLogger("adaptive").addHandler(Resumes())
with world if BLOCK else nullcontext():
    program = ad.Program(driver, 0.0, DATA, global_batch=12, world=world)
    for report in program.run(steps=8):
        if report.step == 3 and ODD:
            if CASE == "breaks":
                break
            odd_one(program)
    if ODD and CASE == "one step more":
        program.step()
    if ODD and CASE == "slow at the end":
        time.sleep(3 * PATIENCE)
    print(f"rank {world.rank} ended well", flush=True)
