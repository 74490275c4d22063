"""A job with per-worker state that goes on from another number of ranks: `mpirun -n N python -m mpi4py other_workers.py
RUN STEPS`.

Rank 0 prints each worker's own sum after the restore and at the end: a worker adds its number plus one in each step.
"""

from __future__ import annotations

import json
import sys

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm

RUN, STEPS = sys.argv[1], int(sys.argv[2])


def driver(state, batch):
    own = state["own"] + ad.worker_index().astype(jnp.float32) + 1.0
    new = {"own": own, "sum": state["sum"] + comm.all_reduce(batch["x"].sum(), op="sum")}
    return new, {"before": comm.all_gather(state["own"]), "after": comm.all_gather(own)}


with comm.world() as world:
    program = ad.Program(
        driver,
        {"own": jnp.zeros(()), "sum": jnp.zeros(())},
        {"x": np.arange(96, dtype=np.float32)},
        global_batch=12,
        world=world,
        seed=4,
        per_worker_state=lambda state: state["own"],
    )
    refused = ""
    try:
        program.restore(RUN, missing_ok=True)
    except ad.CheckpointError as error:
        refused = str(error)
        program.restore(RUN, other_workers_ok=True)
    began = program.steps
    reports = list(program.run(steps=STEPS - began, checkpoint=ad.Checkpoints(RUN, every=STEPS)))
    if world.rank == 0:
        own = {"before": reports[0].metrics["before"].tolist(), "after": reports[-1].metrics["after"].tolist()}
        print(json.dumps({**own, "began": began, "sum": float(program.state["sum"]), "refused": refused}), flush=True)
