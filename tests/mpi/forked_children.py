"""Forked children of a rank that use its world and its program: `adaptive run -n 2 forked_children.py`.

See test_forked_children.py.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm

warnings.filterwarnings("ignore", message=".*fork.*")
X = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)


def driver(w, batch):
    loss, grads = comm.all_reduce(jax.value_and_grad(lambda w: jnp.square(batch @ w - 1).mean())(w))
    return w - 0.1 * grads, {"loss": loss}


def in_child(name, action) -> None:
    """Run an action in a child that catches its error, and in one that ends by it."""
    for catches in (True, False):
        pid = os.fork()
        if pid == 0:
            try:
                action()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                if not catches:
                    raise
            os._exit(7)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == (7 if catches else 1), (name, catches, status)


with comm.world() as world:
    slot = world.workers[0]
    root = Path(world.all_gather_bytes(tempfile.mkdtemp().encode())[0].decode())
    program = ad.Program(driver, jnp.zeros(5), X, global_batch=16, world=world, seed=0, resizable=False)
    for report in program.run(
        steps=20, log=[ad.log.CSV(root / "run.csv")], checkpoint=ad.Checkpoints(root / "c", every=10)
    ):
        if report.step == 10 and slot == 0:
            in_child("step", program.step)
            in_child("run", lambda: list(program.run(steps=3)))
            in_child("evaluate", lambda: program.evaluate(lambda w, batch: jnp.square(batch @ w - 1).mean(), X))
            in_child("checkpoint", program.checkpoint)
            in_child("barrier", world.barrier)
            in_child("all_reduce", lambda: comm.all_reduce(1.0))
    lines = (root / "run.csv").read_text().splitlines()
    print(f"slot {slot}: {program.steps} steps, {world.size} workers, {len(lines)} lines, ", end="")
    print(f"newest {ad.Checkpoints(root / 'c').read()['step']}", flush=True)
