"""A job that grows by spawning: `adaptive run -n N spawned.py CASE [FILE|HANG_TIMEOUT]`; see test_spawned.py.

Where it "grows", two processes are spawned, and join in the same step.
Where it is "replaced", two of three processes are killed after step 5, and of those that are spawned in their place the
first one, which makes FILE, is killed before it has joined. Where it "is stopped", the spawned process stops itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress

import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import controllers as ctrl  # noqa: E402
from tests.program.problems import adam_driver, adam_state, difference, make_data, plain_adam, stream  # noqa: E402
from tests.speed import limit  # noqa: E402

EXAMPLES, GLOBAL_BATCH, SEED = 160, 48, 3
CASE = sys.argv[1]
SPAWNED = "ADAPTIVE_SPAWNED" in os.environ


def driver(state, batch):
    adam = state["adam"]
    if CASE == "another driver" and SPAWNED:
        adam = jax.tree.map(lambda leaf: leaf + 0, adam)
    new, metrics = adam_driver(adam, {"x": batch["x"], "label": batch["label"]})
    taken = comm.all_reduce(jnp.zeros(EXAMPLES, jnp.int32).at[batch["number"]].add(1), op="sum")
    ctrl.hook(grow, every=3)
    return {"adam": new, "taken": state["taken"] + taken}, metrics


def grow(control):
    if control.step == 3 and CASE != "replaced":
        control.rescale(workers=3 if CASE == "grows" else 2)


def admit_two_at_once(spawner):
    ready = spawner.ready

    def when_both_are(digests):
        found = ready(digests)
        return found if len(found) == 2 else []

    spawner.ready = when_both_are


data = {**make_data(EXAMPLES), "number": np.arange(EXAMPLES)}
HANG_TIMEOUT = float(sys.argv[2]) if CASE == "is stopped" else None
with comm.world(max_workers=3, respawn=CASE == "replaced", hang_timeout=HANG_TIMEOUT) as world:
    if CASE == "replaced" and SPAWNED:
        with suppress(FileExistsError), open(sys.argv[2], "x"):
            os.kill(os.getpid(), signal.SIGKILL)
    if CASE == "grows" and not SPAWNED:
        admit_two_at_once(world.elastic.spawner)
    state = {"adam": adam_state(), "taken": jnp.zeros(EXAMPLES, jnp.int32)}
    program = ad.Program(driver, state, data, global_batch=GLOBAL_BATCH, seed=SEED)
    joined, deadline = 0, time.monotonic() + limit(60)
    for report in program.run():
        time.sleep(0.005)  # or the joining rank hardly gets time for its imports
        joined = report.step if report.joined else joined
        if CASE == "replaced" and report.step == 5 and world.workers[0] and not SPAWNED:
            os.kill(os.getpid(), signal.SIGKILL)
        if CASE == "is stopped" and SPAWNED and report.step == joined + 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        late = float(comm.all_reduce(float(time.monotonic() > deadline), op="max"))
        complete = {"replaced": len(report.members) == 3, "is stopped": bool(world.losses)}.get(CASE, True)
        if (
            (joined and complete and report.step > joined + 20)
            or late
            or (CASE != "grows" and world.elastic.spawner.failed)
        ):
            break
    steps = program.steps
    np.testing.assert_array_equal(
        program.state["taken"], np.bincount(stream(EXAMPLES, SEED, steps * GLOBAL_BATCH), minlength=EXAMPLES)
    )
    assert difference(program.state["adam"]["params"], plain_adam(data, [GLOBAL_BATCH] * steps, SEED)) < 1e-10
    grown = "joined" if joined else "did not grow"
    print(f"worker {world.workers[0]} ended well: {grown}, members {world.members}", flush=True)
