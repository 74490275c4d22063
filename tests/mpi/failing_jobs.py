"""Jobs that end badly: `mpirun -n 2 python -m mpi4py failing_jobs.py CASE`; see test_failing_jobs.py."""

from __future__ import annotations

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import controllers as ctrl


def driver(state, batch):
    loss, grad = comm.all_reduce(jax.value_and_grad(lambda s: jnp.square(batch["x"] - s).mean())(state))
    return state - 0.1 * grad, {"loss": loss}


def forgets(state, batch):
    grad = jax.grad(lambda s: jnp.square(batch["x"] - s).mean())(state)
    return state - 0.1 * grad, {}


def watched(state, batch):
    state, metrics = driver(state, batch)
    ctrl.hook(adapt, metrics["loss"])
    return state, metrics


def adapt(control, loss):
    if CASE == "a hook on one rank" and control.step == 3 and RANK == 1:
        raise RuntimeError("out of ideas")


def between_steps(step: int) -> None:
    """User code, in the loop around the steps."""
    if CASE == "between steps" and step == 3 and RANK == 1:
        raise OSError("no space left for a checkpoint")
    if CASE == "a rank that is killed" and step == 3 and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if CASE == "ctrl-c" and step == 3 and RANK == 0:
        os.kill(os.getppid(), signal.SIGINT)  # mpirun's, as from a terminal


CASE = sys.argv[1]
with comm.world() as world:
    RANK = world.rank
    print(f"pid {os.getpid()}", flush=True)
    data = {"x": np.arange(64, dtype=np.float32)}
    program = ad.Program({"forgets": forgets}.get(CASE, watched), 0.0, data, global_batch=8, world=world)
    for report in program.run(steps=10 if CASE == "well" else None):  # for ever, if nothing happens
        between_steps(report.step)
    print(f"rank {world.rank} ended well", flush=True)
