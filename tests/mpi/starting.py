"""Jobs in which a process is killed while it starts: `adaptive run starting.py WHO PHASE NUMBER FILE`.

See test_starting.py. The process leaves FILE when it is about to be killed.

WHO is a rank, or "spawned". The process is killed

    import     at its so-manieth import
    MPI_Init   so many milliseconds after it has begun to load mpi4py
    world      at the so-manieth line of ours in comm.world()
    spawning   so many milliseconds after it has begun to spawn another

The others end well if they can, some steps after it was killed or has joined.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

WHO, PHASE, NUMBER = sys.argv[1], sys.argv[2], int(sys.argv[3])
IS_SPAWNED = "ADAPTIVE_SPAWNED" in os.environ
SPAWNS = WHO == "spawned" or PHASE == "spawning"
DIES = IS_SPAWNED if WHO == "spawned" else not IS_SPAWNED and os.environ["OMPI_COMM_WORLD_RANK"] == WHO
FILE, STEPS = Path(sys.argv[4]), 20
_left = NUMBER


def die() -> None:
    FILE.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def die_later() -> None:
    """By another process: in MPI_Init no thread of this one runs."""
    code = f"import os, time; time.sleep({NUMBER / 1000}); os.kill({os.getpid()}, 9)"
    subprocess.Popen([sys.executable, "-S", "-c", code])
    FILE.touch()


def at_an_import(event: str, arguments: Any) -> None:
    global _left
    if event == "import" and PHASE == "import":
        _left -= 1
        if _left == 0:
            die()
    elif event == "import" and PHASE == "MPI_Init" and arguments[0] == "mpi4py.MPI":
        die_later()


def at_a_line(frame: Any, event: str, argument: Any) -> Any:
    """A trace function."""
    global _left
    if "/collectives/worlds/" not in frame.f_code.co_filename:
        return None
    if event == "line":
        _left -= 1
        if _left == 0:
            die()
    return at_a_line


if DIES:
    sys.addaudithook(at_an_import)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import controllers as ctrl  # noqa: E402
from collectives.worlds.elastic.spawning import Spawner  # noqa: E402

begun = Spawner.spawn


def spawn(self: Spawner, offer: Any) -> None:
    begun(self, offer)
    if DIES and PHASE == "spawning":
        threading.Timer(NUMBER / 1000, die).start()


Spawner.spawn = spawn  # type: ignore[method-assign]


def driver(state, batch):
    loss, grad = comm.all_reduce(jax.value_and_grad(lambda w: jnp.square(batch["x"] - w).mean())(state))
    if SPAWNS:
        ctrl.hook(grow, every=3)
    return state - 0.1 * grad, {"loss": loss}


def grow(control):
    if control.step == 3:
        control.rescale(workers=3)


if DIES and PHASE == "world":
    sys.settrace(at_a_line)
with comm.world(max_workers=3 if SPAWNS else None) as world:
    sys.settrace(None)
    own = world.workers[0]
    program = ad.Program(driver, 0.0, {"x": np.arange(64, dtype=np.float32)}, global_batch=24, world=world)
    if "TESTS_COUNT" in os.environ:
        print("lines", NUMBER - _left)
    last = None
    for report in program.run():
        if last is None and not SPAWNS:
            last = report.step + STEPS
        elif last is None:
            over = FILE.exists() or len(world.members) > 2
            last = report.step + STEPS if comm.all_reduce(float(over), op="max") else None
        elif report.step >= last:
            break
    print(f"worker {own} ended well", flush=True)
