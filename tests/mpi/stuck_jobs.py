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


def driver(state, batch):
    loss, grad = comm.all_reduce(jax.value_and_grad(lambda s: jnp.square(batch["x"] - s).mean())(state))
    return state - 0.1 * grad, {"loss": loss}


def odd_one(case: str, program: ad.Program, world: comm.MPIWorld) -> None:
    """What the last rank does after step 3, while the others go on."""
    match case:
        case "sleeps":
            time.sleep(1000)
        case "loops":
            while True:
                pass
        case "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "holds the lock":  # of Python: this takes for ever, and nothing else runs meanwhile
            re.match(r"(a+)+$", "a" * 200 + "b")
        case "sys.exit":
            sys.exit(0)
        case "os._exit":
            os._exit(0)
        case "raises":
            raise OSError("no space left")
        case "one step more":
            program.step()
        case "evaluates alone":
            program.evaluate(lambda s, b: jnp.square(b["x"] - s).mean(), DATA)
        case "leaves by an error that others do not see":
            raise ad.DisagreementError("as if all had it")


CASE, PATIENCE, BLOCK = sys.argv[1], float(sys.argv[2]), sys.argv[3:] == ["block"]
DATA = {"x": np.arange(64, dtype=np.float32)}
logging.basicConfig(format="%(levelname)s %(process)d %(message)s", level=logging.INFO)
world = comm.world(patience=PATIENCE)
print(f"rank {world.rank} pid {os.getpid()}", flush=True)
with world if BLOCK else nullcontext():
    program = ad.Program(driver, 0.0, DATA, global_batch=12, world=world)
    for report in program.run(steps=8):
        if report.step == 3 and world.rank == world.processes - 1:
            odd_one(CASE, program, world)
    print(f"rank {world.rank} ended well", flush=True)
