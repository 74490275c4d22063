"""A job that saves checkpoints and resumes from them: `mpirun -n N python -m mpi4py checkpointing.py RUN STEPS`.

Rank 0 prints where the job began, and its end as text, to be compared with that of other jobs.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import adaptive as ad
import collectives as comm
from tests.program.problems import adam_driver, adam_state, make_data

RUN, STEPS = sys.argv[1], int(sys.argv[2])
with comm.world() as world:
    program = ad.Program(adam_driver, adam_state(), make_data(), global_batch=12, world=world, deterministic=True)
    program.restore(RUN, missing_ok=True)
    began = program.steps
    reports = list(program.run(steps=STEPS - began, checkpoint=ad.Checkpoints(RUN, every=2)))
    if world.rank == 0:
        state = {k: np.asarray(v).tolist() for k, v in program.state["params"]["inner"].items()}
        result = {"workers": world.size, "began": began, "losses": [float(r.metrics["loss"]) for r in reports]}
        print(json.dumps({**result, "state": state, "examples": reports[-1].examples}), flush=True)
