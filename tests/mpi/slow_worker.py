"""A worker that becomes slow is replaced by the reserve: `mpirun -n 3 … slow_worker.py`; see test_slow_worker.py.

Kernels sleep in a callback, so that the times do not depend on what else the machine does.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

SLOW, FROM, STEPS = 0, 80, 400
USUAL, LONG = 0.01, 0.04  # seconds
slow_now = False


def work(x):
    time.sleep(LONG if slow_now else USUAL)
    return x


def end(control, seconds):
    """End the run once the slow worker has no examples."""
    if control.batch_sizes[SLOW] == 0:
        control.stop()


def driver(w, batch):
    x = jax.pure_callback(work, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0))
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - 1) ** 2) + x)(w)
    grads, loss = comm.all_reduce((grads, loss))
    seconds = comm.all_gather(mon.compute_seconds())
    ctrl.hook(ctrl.mitigate_slow_workers(swap_seconds=0.2), seconds, every=5)
    ctrl.hook(end, seconds, every=5)
    return w - 0.05 * grads, {"loss": loss}


with comm.world(workers=2) as world:
    data = {"x": np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)}
    program = ad.Program(driver, jnp.zeros(4), data, global_batch=16, world=world)
    for report in program.run(steps=STEPS):
        slow_now = SLOW in world.workers and report.step >= FROM
        if world.workers[0] == SLOW:
            for note in report.notes:
                print(report.step, note, flush=True)
    if world.workers[0] == SLOW:
        print("ended after", program.steps, "with", program.batch_sizes, flush=True)
