"""A run that logs, keeps checkpoints, and is killed: `python killed_while_logging.py FOLDER KILLED_AFTER [RANK]`.

It runs for 40 steps, on as many ranks as there are, with a log of each kind in FOLDER. After step KILLED_AFTER the
process with rank RANK, or each process, is killed by SIGKILL; 0: none is. The metric `attempt` is the number of times
that the script was started on FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import adaptive as ad
import collectives as comm

FOLDER, KILLED_AFTER = Path(sys.argv[1]), int(sys.argv[2])
RANK = int(sys.argv[3]) if len(sys.argv) > 3 else None
STEPS, EVERY = 40, 10


def driver(state, batch):
    return state + comm.all_reduce(batch["x"].mean()), {"attempt": comm.all_reduce(batch["attempt"].mean())}


with comm.world() as world:
    started = FOLDER / "started"
    attempt = len(started.read_text()) + 1 if started.exists() else 1
    world.barrier()
    if world.rank == 0:
        started.write_text("x" * attempt)
    data = {"x": np.linspace(0, 1, 48, dtype=np.float32), "attempt": np.full(48, attempt, np.float32)}
    log = [ad.log.CSV(FOLDER / "run.csv"), ad.log.JSONL(FOLDER / "run.jsonl"), ad.log.TensorBoard(FOLDER / "board")]
    kept = ad.Checkpoints(FOLDER / "kept", every=EVERY)
    with ad.Program(driver, 0.0, data, global_batch=12, world=world, resizable=False) as program:
        program.restore(kept, missing_ok=True)
        began_as = world.rank
        for report in program.run(steps=STEPS - program.steps, checkpoint=kept, log=log):
            time.sleep(0.02)
            if report.step == KILLED_AFTER and RANK in (None, began_as):
                if report.step >= EVERY:
                    program._parts.run.checkpointer.wait()  # the checkpoint is there
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"rank {began_as} ended after step {program.steps}, epoch {program.epoch}", flush=True)
