"""Jobs whose ranks receive SIGTERM: `mpirun -n 4 … preempted.py RUN PHASE:RANK …`; see test_preemption.py.

Each rank that is named gets SIGTERM in its phase, or, where the phase ends in " twice", SIGUSR1 and SIGTERM. The
remaining ranks check that their results are those of a plain loop over the same stream, with every example once.
Checkpoints are saved in RUN, and resumed; without a RUN ("-") there are none.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections import Counter

import jax

jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import controllers as ctrl  # noqa: E402
import monitors as mon  # noqa: E402
from adaptive.control import membership  # noqa: E402
from adaptive.program.run_checkpointer import RunCheckpointer  # noqa: E402
from adaptive.runtime.engine import Engine  # noqa: E402
from collectives.worlds.elastic.standby import StandbyLoop  # noqa: E402
from tests.program.problems import adam_driver, adam_state, difference, make_data, mean_loss, plain_adam, stream  # noqa: E402

EXAMPLES, GLOBAL_BATCH, SEED = 160, 48, 3
RUN, *arguments = sys.argv[1:]
PHASES = dict(reversed(argument.split(":")) for argument in arguments if ":" in argument)  # phase, by worker slot
STEPS = next((int(a.removeprefix("steps=")) for a in arguments if a.startswith("steps=")), None)  # more of them
WORKERS = next((int(a.removeprefix("workers=")) for a in arguments if a.startswith("workers=")), None)
if "at once" in arguments:  # do not wait for signals to others
    membership.TOGETHER_SECONDS = 0.0
MINE = ""  # the phase in which this rank is signaled
_times: Counter[str] = Counter()


def send_signal(pid: int | None = None) -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM) if MINE.endswith("twice") else (signal.SIGTERM,):
        os.kill(pid or os.getpid(), number)


def phase(name: str, at: int = 1) -> None:
    """A place where a rank may be signaled: at the `at`-th pass."""
    _times[name] += 1
    if name == MINE.removesuffix(" twice") and _times[name] == at:
        send_signal()


def driver(state, batch):
    phase("tracing", at=2)
    new, metrics = adam_driver(state["adam"], {"x": batch["x"], "label": batch["label"]})
    taken = comm.all_reduce(jnp.zeros(EXAMPLES, jnp.int32).at[batch["number"]].add(1), op="sum")
    seconds = comm.all_gather(mon.compute_seconds())
    ctrl.hook(watch, every=2)
    ctrl.hook(ctrl.balance(), seconds, every=5)
    return {"adam": new, "taken": state["taken"] + taken}, {**metrics, "seconds": seconds}


def watch(control):
    phase("a hook", at=3)


def evaluated(state, batch):
    phase("evaluate")
    return {"loss": mean_loss(state["adam"]["params"], batch)}


def watched(name: str, at: int, kind: object, method: str) -> None:
    original = getattr(kind, method)

    def wrapped(*args, **kwargs):
        phase(name, at)
        return original(*args, **kwargs)

    setattr(kind, method, wrapped)


def check(program: ad.Program) -> None:
    taken = np.bincount(stream(EXAMPLES, SEED, program.steps * GLOBAL_BATCH), minlength=EXAMPLES)
    np.testing.assert_array_equal(program.state["taken"], taken)
    reference = plain_adam(data, [GLOBAL_BATCH] * program.steps, SEED)
    assert difference(program.state["adam"]["params"], reference) < 1e-10


watched("the first compile", 1, Engine, "compile")
watched("a checkpoint on disk", 1, RunCheckpointer, "save")
watched("in reserve", 1, StandbyLoop, "next")
data = {**make_data(EXAMPLES), "number": np.arange(EXAMPLES)}
try:
    with comm.world(workers=WORKERS) as world:
        own = world.workers[0]
        MINE = PHASES.get(str(own), "")
        pids = [int(pid) for pid in world.all_gather_bytes(str(os.getpid()).encode())]
        phase("before a program is built")
        program = ad.Program(
            driver,
            {"adam": adam_state(), "taken": jnp.zeros(EXAMPLES, jnp.int32)},
            data,
            global_batch=GLOBAL_BATCH,
            seed=SEED,
        )
        kept = None if RUN == "-" else ad.Checkpoints(RUN, every=20)
        if kept is not None:
            program.restore(kept, missing_ok=True)
        watched("the background", 2, type(program._parts.engine.kernels.compiled), "compile")
        heard = world.transport.preamble.heard

        def heard_in_an_exchange():
            if world.transport.operation.about.startswith("message "):
                phase("an exchange", 5)
            return heard()

        world.transport.preamble.heard = heard_in_an_exchange
        began = program.steps
        for report in program.run(steps=STEPS, checkpoint=kept):
            step = report.step - began
            assert report.global_batch == GLOBAL_BATCH, report
            for note in report.notes:
                if "termination signal" in note and world.rank == 0:
                    print(f"step {step}: {note}", flush=True)
            phase("between steps", at=7)
            if step == 5:
                if MINE.startswith("within 100 ms"):
                    threading.Timer(random.Random(own + began).uniform(0, 0.1), send_signal).start()
                for worker_slot, where in PHASES.items():
                    if where == "blocked" and world.rank == 0:  # the others are in the next step, and wait for us
                        send_signal(pids[int(worker_slot)])
                if world.rank == 0:
                    print("under way", flush=True)
            if step == 20:
                whole = program.evaluate(evaluated, data, batch=16)["loss"]
                np.testing.assert_allclose(whole, mean_loss(program.state["adam"]["params"], data), rtol=1e-12)
            if step == 25:
                phase("before a checkpoint")
                program.checkpoint()
        check(program)
        print(f"rank {own} ended well, of {len(world.members)}", flush=True)
except ad.Preempted as error:
    if error.alone:
        print(f"rank {own} left alone after step {program.steps - began}: {error}", flush=True)
    else:
        if not world.in_reserve:
            check(program)
        print(f"rank {own} ends with all: {error}", flush=True)
    raise
