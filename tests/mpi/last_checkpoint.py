"""A rank is killed while the last checkpoint is written: `mpirun -n 2 … last_checkpoint.py RUN EVERY STEPS`.

Rank 0 kills itself as soon as the directory changes after the last step. See test_last_checkpoint.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm

DIRECTORY, EVERY, STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
X = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)


def driver(state, batch):
    grads = comm.all_reduce(jax.grad(lambda w: jnp.mean((batch @ w[:8] - 1) ** 2))(state["w"]))
    return {"w": state["w"] - 0.01 * grads, "own": state["own"] + 1}, {}


def content() -> set[Path]:
    return set(DIRECTORY.rglob("*"))


def kill_when_writing(before: set[Path]) -> None:
    while content() <= before:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


with comm.world() as world:
    first = world.rank == 0
    state = {"w": jnp.zeros(1 << 20), "own": jnp.zeros(())}
    local = (lambda state: state["own"]) if STEPS % EVERY else None
    program = ad.Program(driver, state, X, global_batch=48, world=world, per_worker_state=local)
    for report in program.run(steps=STEPS, checkpoint=ad.Checkpoints(DIRECTORY, every=EVERY, keep=2)):
        if first and report.step == STEPS - 1:
            time.sleep(1)  # the checkpoint before is on disk
            threading.Thread(target=kill_when_writing, args=(content(),), daemon=True).start()
    if first:
        time.sleep(10)
    print(
        f"{world.size} left after step {program.steps}, newest {ad.Checkpoints(DIRECTORY).read()['step']}", flush=True
    )
