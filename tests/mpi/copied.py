"""Jobs whose state is copied to other processes' memory: `copied.py CASE [HOSTS]`; see test_memory_copies.py.

Two workers train, others are in reserve or are spawned; in "beside" and "at once" a spawned one joins while another one
stays in reserve. Each example must be taken once per epoch, whatever is lost.
Each worker counts its steps in its per-worker state. HOSTS are the ranks' hosts, which are made up: 0,0,1,1.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm
from collectives.worlds import mpi
from collectives.worlds.mailboxes.seqlock import SlotLayout

CASE, HOSTS = sys.argv[1], sys.argv[2:]
EXAMPLES, STEPS, DIES = 64, 40, 20
BESIDE = CASE in ("beside", "at once")
data = {"number": np.arange(EXAMPLES)}
logging.basicConfig(level=logging.WARNING)


def driver(state, batch):
    taken = comm.all_reduce(jnp.zeros(EXAMPLES, jnp.int32).at[batch["number"]].add(1), op="sum")
    new = {"taken": state["taken"] + taken, "steps": state["steps"] + comm.local_mean(jnp.float32(1))}
    return new, {"examples": taken.sum()}


def made_up(comm, host, n_devices):
    if comm.size == 1:  # a spawned process
        return found(comm, host, n_devices)
    hosts = map(int, HOSTS[0].split(","))
    return tuple(p._replace(host=number) for p, number in zip(found(comm, host, n_devices), hosts, strict=True))


if HOSTS:
    found, mpi.all_processes = mpi.all_processes, made_up


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_copying() -> None:
    """Die when the next publication of a large vector is half written."""
    write = SlotLayout.write

    def torn(self, place, round, vectors, fence):
        if len(vectors) > 2:  # the replicated state
            vectors[-1] = DeadlyVector(vectors[-1])
        write(self, place, round, vectors, fence)

    SlotLayout.write = torn


class DeadlyVector:
    """A vector whose bytes cannot be read without dying."""

    def __init__(self, vector):
        self.nbytes = vector.nbytes

    def reshape(self, *shape):
        die()


def join_beside_the_reserve(program, report) -> None:
    """Request two more workers, and one when the spawned one is ready to join; then all members die."""
    world = program.world
    if report.step == 3:
        program.rescale(workers=4)
    if report.step == 5:
        while world.rank == 0 and not world.poll_ready():
            time.sleep(0.01)
        program.rescale(workers=3)
    if world.members == (0, 1, 3) and report.step == DIES:
        time.sleep(1.0 if HOSTS else 0.0)  # for the reserve on another host, which fetches the copies
        die()


def main() -> None:
    options = {"max_workers": 2} if CASE == "spawned" else {"workers": 2}
    options |= {"max_workers": 4} if BESIDE else {}
    with comm.world(**options, respawn=CASE in ("one", "spawned"), hang_timeout=60) as world:
        state = {"taken": jnp.zeros(EXAMPLES, jnp.int32), "steps": jnp.zeros(())}
        program = ad.Program(
            *(driver, state, data),
            global_batch=8,
            world=world,
            per_worker_state=lambda state: state["steps"],
        )
        first = world.workers[0]
        if BESIDE and first == 2:
            program._parts.engine.kernels.can_join = lambda: False  # it gets ready too late
        elif CASE == "at once":
            program._parts.copies.hand_over = lambda joined, name: die()
        for report in program.run(steps=STEPS, checkpoint=ad.Checkpoints(memory=1, memory_every=1)):
            if world.rank == 0:
                for note in report.notes:
                    print(f"step {report.step}: {note}", flush=True)
            if BESIDE:
                join_beside_the_reserve(program, report)
                continue
            if world.losses and len(world.members) < 2:
                time.sleep(1.5 if CASE == "spawned" else 0.3)  # for the worker that gets ready to join
            if report.step == DIES and (first == 1 or CASE in ("all", "torn")) and not world.losses:
                time.sleep(1.0 if HOSTS else 0.0)  # for the processes of other hosts, which fetch the copies
                if CASE == "torn" and first == 0:
                    die_while_copying()
                else:
                    die()
        counts = np.asarray(program.state["taken"])
        assert program.steps == STEPS
        assert (counts == STEPS * 8 // EXAMPLES).all(), counts
        mine = float(program.state["steps"])
        print(f"worker {first} of {world.members} ended well with {mine:.0f} steps", flush=True)


main()
