"""Requests during steady steps: `mpirun -n 3 … steady_requests.py WORKERS MIN_WORKERS EVENT@STEP …`.

The events: `set` and `rescale`, by the script on all ranks; `leave=SLOT`, SIGTERM to the process of a worker slot;
`stop`, by a hook that is due at no other step. See test_steady_requests.py.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
import controllers as ctrl

WORKERS, MIN_WORKERS, *arguments = sys.argv[1:]
EVENTS = {int(step): event for event, step in (argument.split("@") for argument in arguments)}
STOP = next((step for step, event in EVENTS.items() if event == "stop"), 0)
X = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)


def driver(state, batch):
    lr = ad.hyperparameter("lr", 0.01)
    loss, grads = comm.all_reduce(jax.value_and_grad(lambda w: jnp.mean((batch @ w - 1) ** 2))(state["w"]))
    taken = comm.all_reduce(jnp.asarray(batch.shape[0]), op="sum")
    if STOP:
        ctrl.hook(lambda control: control.stop(), every=STOP)
    return {"w": state["w"] - lr * grads, "taken": state["taken"] + taken}, {"loss": loss}


with comm.world(workers=int(WORKERS), min_workers=int(MIN_WORKERS)) as world:
    slot = world.workers[0]
    pids = [int(pid) for pid in world.all_gather_bytes(str(os.getpid()).encode())]
    directory = world.all_gather_bytes(tempfile.mkdtemp().encode())[0].decode()
    state = {"w": jnp.zeros(8), "taken": jnp.zeros((), jnp.int32)}
    program = ad.Program(driver, state, X, global_batch=48, world=world, seed=0)
    options = ad.Checkpoints(directory, every="0.001 minutes") if "checkpoints@0" in arguments else None
    examples = 0
    try:
        for report in program.run(steps=400, checkpoint=options):
            examples += report.global_batch
            event, _, argument = EVENTS.get(report.step, "").partition("=")
            if event == "set":
                program.set_hyperparameters(lr=0.015625)
            if event == "rescale":
                program.rescale(global_batch=30)
            if event == "leave" and world.rank == 0:
                os.kill(pids[int(argument)], signal.SIGTERM)
    except ad.Preempted as why:
        print(f"slot {slot} preempted, alone: {why.alone}; step {program.steps}", flush=True)
        raise
    taken, lr = int(program.state["taken"]), program.hyperparameters["lr"]
    right = "as reported" if taken == examples or world.in_reserve else f"but reported {examples}"
    end = f"{program.steps} steps, members {world.members}, batch {program.global_batch}, lr {lr}, examples {right}"
    print(f"slot {slot}: {end}", flush=True)
