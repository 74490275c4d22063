"""A job whose first start is killed as a whole: `restarted.py FOLDER [RESERVE]`; see test_restarts_on_ranks.py."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm

FOLDER, STEPS, DIES = Path(sys.argv[1]), 16, 12
RESERVE = int(sys.argv[2]) if len(sys.argv) > 2 else 0  # processes


def driver(state, batch):
    return state + comm.all_reduce(batch["x"].sum(), op="sum"), {}


with comm.world(workers=int(os.environ["OMPI_COMM_WORLD_SIZE"]) - RESERVE) as world:
    program = ad.Program(driver, jnp.zeros(()), {"x": np.arange(64.0)}, global_batch=8, world=world)
    program.restore(FOLDER, missing_ok=True)
    began = program.steps
    for report in program.run(steps=STEPS - began, checkpoint=ad.Checkpoints(FOLDER, every=5)):
        if report.step == DIES and not began:
            program._parts.run.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 0:
        print(f"from step {began} to {program.steps}: {float(program.state):.0f}", flush=True)
