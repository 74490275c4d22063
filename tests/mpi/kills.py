"""Jobs whose ranks are killed, stopped, signaled and spawned: `adaptive run -n N kills.py CASE [ARGUMENT …]`.

What is left in the end is compared with one worker on the same examples. See test_kills.py.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import controllers as ctrl  # noqa: E402
from tests.contract.problem import COUNTED, DATA, check_counted, descend_and_count  # noqa: E402
from tests.speed import limit  # noqa: E402

CASE, *ARGUMENTS = sys.argv[1:]
SPAWNED = "ADAPTIVE_SPAWNED" in os.environ
BATCH = 12


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- at the end of a run, and all at once -----------------------------------------------------------------------------


def last_checkpoint() -> None:
    """FOLDER EVERY STEPS: rank 0 is killed as soon as the folder changes after the last step."""
    folder, every, steps = Path(ARGUMENTS[0]), int(ARGUMENTS[1]), int(ARGUMENTS[2])

    def driver(state, batch):
        w, metrics = descend_and_count(state["w"], batch)
        return {"w": w, "own": state["own"] + 1, "large": state["large"]}, metrics

    def kill_when_writing(content: set[Path]) -> None:
        while set(folder.rglob("*")) <= content:
            pass
        die()

    with comm.world() as world:
        state = {"w": COUNTED, "own": jnp.zeros(()), "large": jnp.zeros(1 << 20)}
        local = (lambda state: state["own"]) if steps % every else None
        program = ad.Program(driver, state, DATA, global_batch=BATCH, per_worker_state=local, resizable=False)
        for report in program.run(steps=steps, checkpoint=ad.Checkpoints(folder, every=every, keep=2)):
            if world.workers[0] == 0 and report.step == steps - 1:
                program._parts.run.checkpointer.wait()  # the checkpoint before is on disk
                threading.Thread(target=kill_when_writing, args=(set(folder.rglob("*")),), daemon=True).start()
        newest = ad.Checkpoints(folder).read()["step"]
        print(f"{world.size} left after step {program.steps}, newest {newest}", flush=True)


def all_at_once() -> None:
    """FOLDER RESERVE: all workers are killed after step 12, but for so many processes in reserve."""
    folder, reserve = Path(ARGUMENTS[0]), int(ARGUMENTS[1])
    with comm.world(workers=int(os.environ["OMPI_COMM_WORLD_SIZE"]) - reserve) as world:
        program = ad.Program(descend_and_count, COUNTED, DATA, global_batch=BATCH, resizable=False)
        program.restore(folder, missing_ok=True)
        began = program.steps
        for report in program.run(steps=16 - began, checkpoint=ad.Checkpoints(folder, every=5)):
            if report.step == 12 and not began:
                program._parts.run.checkpointer.wait()
                die()
        check_counted(program.state, [BATCH] * 16)
        if world.rank == 0:
            print(f"from step {began} to {program.steps}", flush=True)


# --- processes that are spawned ---------------------------------------------------------------------------------------


def grow(control):
    if control.step == 3 and CASE != "replaced":
        control.rescale(workers=3 if CASE == "grows" else 2)


def growing(state, batch):
    if CASE == "another_driver" and SPAWNED:
        state = jax.tree.map(lambda leaf: leaf + 0, state)
    ctrl.hook(grow, every=3)
    return descend_and_count(state, batch)


def admit_two_at_once(spawner) -> None:
    ready = spawner.ready

    def when_both_are(digests):
        found = ready(digests)
        return found if len(found) == 2 else []

    spawner.ready = when_both_are


def spawned() -> None:
    """In the case "grows" two processes are spawned, and join in the same step. Where some are "replaced", two of three
    processes are killed after step 5, and of those spawned in their place the first one, which makes the file of the
    argument, is killed before it has joined. In the case "stopped" the spawned process stops itself; the argument is
    the hang_timeout.
    """
    patience = float(ARGUMENTS[0]) if CASE == "stopped" else None
    with comm.world(max_workers=3, respawn=CASE == "replaced", hang_timeout=patience) as world:
        if CASE == "replaced" and SPAWNED:
            with suppress(FileExistsError), open(ARGUMENTS[0], "x"):
                die()
        if CASE == "grows" and not SPAWNED:
            admit_two_at_once(world.spawner)
        program = ad.Program(growing, COUNTED, DATA, global_batch=BATCH)
        joined, deadline = 0, time.monotonic() + limit(60)
        for report in program.run():
            time.sleep(0.005)  # or the joining rank hardly gets time for its imports
            joined = report.step if report.joined else joined
            if CASE == "replaced" and report.step == 5 and world.workers[0] and not SPAWNED:
                die()
            if CASE == "stopped" and SPAWNED and report.step == joined + 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            late = float(comm.all_reduce(float(time.monotonic() > deadline), op="max"))
            complete = {"replaced": len(report.members) == 3, "stopped": bool(world.losses)}.get(CASE, True)
            over = (joined and complete and report.step > joined + 20) or late
            if over or (CASE != "grows" and world.spawner.failed):
                break
        check_counted(program.state, [BATCH] * program.steps)
        grown = "joined" if joined else "not grown"
        print(f"worker {world.workers[0]} has {grown}, members {world.members}", flush=True)


if __name__ == "__main__":
    {
        "last_checkpoint": last_checkpoint,
        "all_at_once": all_at_once,
    }.get(CASE, spawned)()
    print("ended well", flush=True)
