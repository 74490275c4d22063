"""A run that is recorded through kills: `adaptive run -n 3 ledgered.py FOLDER PART`; see test_ledger_on_ranks.py.

In part 1 a rank is killed, then rank 0, which records, and at last the only one that is left, some steps after a
checkpoint. Part 2 restores it; one rank more is killed.
"""

from __future__ import annotations

import time

BEGAN = time.time()

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402

FOLDER, PART = Path(sys.argv[1]), int(sys.argv[2])
KILLS = {1: {40: 2, 75: 0, 112: 1}, 2: {140: 0}}[PART]  # worker slot, by the step after which it is killed
STEPS = 180


def driver(w, batch):
    loss, grad = jax.value_and_grad(lambda w: jnp.square(batch["x"] @ w - 1).mean())(w)
    grad, loss = comm.all_reduce((grad, loss))
    return w - 0.05 * grad, {"loss": loss}


with comm.world() as world:
    data = {"x": np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)}
    program = ad.Program(driver, jnp.zeros(4), data, global_batch=16, world=world)
    kept = ad.Checkpoints(FOLDER / "kept", every="30 steps")
    program.restore(kept, missing_ok=True)
    restored = program.steps
    if world.rank == 0:
        with open(FOLDER / "steps", "a") as file:
            print(restored, BEGAN, file=file)
    for report in program.run(steps=STEPS - restored, checkpoint=kept, record=FOLDER / "run.jsonl"):
        if world.rank == 0:
            with open(FOLDER / "steps", "a") as file:
                print(report.step, time.time(), file=file)
        time.sleep(0.01)
        if KILLS.get(report.step) in world.workers:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
