"""Jobs in which a rank is lost when some have completed what all were in, and one has not; see test_losses.py.

`adaptive run -n 4 half_completed.py CASE`. Three workers, and a process in reserve. One worker dies
when it has done its part of an operation; the others have completed it, but on one MPI reports a lost rank.
What comes next is done somewhere else than among the workers, or needs what the operation has brought.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import jax

jax.config.update("jax_enable_x64", True)
import psutil  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
from collectives.worlds.transport import operations  # noqa: E402
from tests.program.problems import adam_driver, adam_state, difference, make_data, plain_adam  # noqa: E402

CASE, STEPS, GLOBAL_BATCH, SEED = sys.argv[1], 40, 48, 3
DIES = 2
is_done = False


def is_there(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lose() -> None:
    """Called once after an operation: one rank dies, and another gets an error as if within the operation."""
    global is_done
    is_done = True
    if own == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if own == HEARS:
        while is_there(pids[DIES]):
            time.sleep(0.001)
        raise world.transport.mpi.Exception(world.transport.mpi.ERR_PROC_FAILED)


def half_completed_hand_over() -> None:
    original = operations.StateTransfer.carry_out

    def carry_out(self, comm):
        original(self, comm)
        if not is_done:
            if own == HEARS:
                self.result = None
            lose()

    operations.StateTransfer.carry_out = carry_out


def half_completed_message(words: str) -> None:
    """The first whose description contains these words."""

    def arrive(self, status):
        vars(self)["arrived"] = status
        if not is_done and world.transport.inside and words in self.about:
            lose()

    operations.ReduceMessage.arrived = property(lambda self: vars(self)["arrived"], arrive)


HEARS = 3 if CASE == "a hand-over" else 1
with comm.world(workers=3) as world:
    own = world.workers[0]
    pids = [int(pid) for pid in world.all_gather_bytes(str(os.getpid()).encode())]
    program = ad.Program(adam_driver, adam_state(), make_data(160), global_batch=GLOBAL_BATCH, seed=SEED)
    if CASE == "the end of a run":
        half_completed_message(f"step {STEPS} ")
    elif CASE == "a join":  # in step 5 the status says that the fourth is ready
        half_completed_message("step 5 ")
    elif CASE == "a hand-over":
        half_completed_hand_over()
    program.warm_up()
    for report in program.run(steps=STEPS):
        if report.step == 3 and CASE in ("a join", "a hand-over"):
            program.rescale(workers=4)
        while report.step == 4 and CASE in ("a join", "a hand-over") and own == 0 and not world.poll_ready():
            time.sleep(0.001)
    assert program.steps == STEPS
    assert difference(program.state["params"], plain_adam(make_data(160), [GLOBAL_BATCH] * STEPS, SEED)) < 1e-10
    assert is_done or own != HEARS
    assert DIES not in world.members, world.members
    print(f"rank {own} has what a plain loop brings", flush=True)
print(f"rank {own} ended well", flush=True)
