"""Jobs in which a process is killed while it starts: `adaptive run starting.py WHO PHASE NUMBER`; see test_starting.py.

WHO is a rank, or "spawned". The process is killed

    import     at its so-manieth import
    MPI_Init   so many milliseconds after it has begun to load mpi4py
    world      at its so-manieth call of MPI in comm.world()
    spawning   so many milliseconds after it has begun to spawn another

The others end well if they can, after as many steps as they take by then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

WHO, PHASE, NUMBER = sys.argv[1], sys.argv[2], int(sys.argv[3])
IS_SPAWNED = "ADAPTIVE_RECRUIT" in os.environ
SPAWNS = WHO == "spawned" or PHASE == "spawning"
DIES = IS_SPAWNED if WHO == "spawned" else not IS_SPAWNED and os.environ["OMPI_COMM_WORLD_RANK"] == WHO
STEPS = 40
_left = NUMBER


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_later() -> None:
    """By another process: in MPI_Init no thread of this one runs."""
    code = f"import os, time; time.sleep({NUMBER / 1000}); os.kill({os.getpid()}, 9)"
    subprocess.Popen([sys.executable, "-S", "-c", code])


def at_an_import(event: str, arguments: Any) -> None:
    global _left
    if event == "import" and PHASE == "import":
        _left -= 1
        if _left == 0:
            die()
    elif event == "import" and PHASE == "MPI_Init" and arguments[0] == "mpi4py.MPI":
        die_later()


def at_a_call(frame: Any, event: str, function: Any) -> None:
    """A profile function."""
    global _left
    if event == "c_call" and type(getattr(function, "__self__", None)).__module__.startswith("mpi4py"):
        _left -= 1
        if _left == 0:
            die()


if DIES:
    sys.addaudithook(at_an_import)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import controllers as ctrl  # noqa: E402
from collectives.worlds.recruits import Recruiting  # noqa: E402

begun = Recruiting.spawn


def spawn(self: Recruiting, offer: Any) -> None:
    begun(self, offer)
    if DIES and PHASE == "spawning":
        threading.Timer(NUMBER / 1000, die).start()


Recruiting.spawn = spawn  # type: ignore[method-assign]


def driver(state, batch):
    loss, grad = comm.all_reduce(jax.value_and_grad(lambda w: jnp.square(batch["x"] - w).mean())(state))
    if SPAWNS:
        ctrl.hook(grow, every=3)
    return state - 0.1 * grad, {"loss": loss}


def grow(control):
    if control.step == 3:
        control.rescale(workers=3)


if DIES and PHASE == "world":
    sys.setprofile(at_a_call)
with comm.world(max_workers=3 if SPAWNS else None) as world:
    sys.setprofile(None)
    own = world.workers[0]
    program = ad.Program(driver, 0.0, {"x": np.arange(64, dtype=np.float32)}, global_batch=24, world=world)
    until = time.monotonic() + 1 + (NUMBER / 1000 if SPAWNS else 0)
    for report in program.run():
        if report.step >= STEPS and comm.all_reduce(float(time.monotonic() > until), op="min"):
            break
    print(f"worker {own} ended well", flush=True)
