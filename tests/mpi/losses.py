"""Jobs whose ranks die: `mpirun --with-ft ulfm -n 4 python -m mpi4py losses.py PHASE:RANK …`; see test_losses.py.

Each rank that is named kills itself in its phase. The others check that what they have in the end is what a plain loop
over the same stream brings, and that every example was taken once.
"""

from __future__ import annotations

import os
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
from adaptive.runtime.engine import Engine  # noqa: E402
from tests.program.problems import adam_driver, adam_state, difference, make_data, mean_loss, plain_adam, stream  # noqa: E402

EXAMPLES, GLOBAL_BATCH, SEED, STEPS = 160, 48, 3, 30
DIES = dict(reversed(argument.split(":")) for argument in sys.argv[1:] if ":" in argument)  # phase, by rank
MINE = ""  # the phase in which this rank dies
_times: Counter[str] = Counter()


def phase(name: str, at: int = 1) -> None:
    """Where a rank may die: at the `at`-th time that it comes here."""
    _times[name] += 1
    if name == MINE and _times[name] == at:
        os.kill(os.getpid(), signal.SIGKILL)


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


def watched(name: str, at: int, kind: type, method: str) -> None:
    original = getattr(kind, method)

    def wrapped(*args, **kwargs):
        phase(name, at)
        return original(*args, **kwargs)

    setattr(kind, method, wrapped)


def expected(examples: int) -> np.ndarray:
    return np.bincount(stream(EXAMPLES, SEED, examples), minlength=EXAMPLES)


watched("the first compile", 1, Engine, "compile")
data = {**make_data(EXAMPLES), "number": np.arange(EXAMPLES)}
with comm.world(min_workers=2 if "min_workers=2" in sys.argv else 1) as world:
    own = world.rank
    MINE = DIES.get(str(own), "")
    phase("before a program is built")
    program = ad.Program(
        driver,
        {"adam": adam_state(), "taken": jnp.zeros(EXAMPLES, jnp.int32)},
        data,
        global_batch=GLOBAL_BATCH,
        seed=SEED,
    )
    watched("the background", 2, type(program._parts.engine.kernels.compiled), "compile")
    heard = world.transport.preamble.heard

    def heard_in_an_exchange():
        if world.transport.operation.about.startswith("message "):
            phase("an exchange", 5)
        return heard()

    world.transport.preamble.heard = heard_in_an_exchange
    lost: list = []
    for report in program.run(steps=STEPS):
        phase("between steps", at=7)
        lost += report.lost
        assert report.global_batch == GLOBAL_BATCH, report
        assert np.isnan(np.asarray(report.metrics["seconds"])[[loss.workers[0] for loss in lost]]).all(), report
        if report.step == 3 and MINE == "any time":
            threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        if report.step == 20:
            whole = program.evaluate(evaluated, data, batch=16)["loss"]
            np.testing.assert_allclose(whole, mean_loss(program.state["adam"]["params"], data), rtol=1e-12)
        if report.step == 25:
            phase("before a checkpoint")
            program.checkpoint()
    assert program.steps == STEPS
    np.testing.assert_array_equal(program.state["taken"], expected(STEPS * GLOBAL_BATCH))
    reference = plain_adam(data, [GLOBAL_BATCH] * STEPS, SEED)
    assert difference(program.state["adam"]["params"], reference) < 1e-10
    assert sorted(loss.workers[0] for loss in world.losses) == sorted(map(int, DIES)), world.losses
    assert world.processes == len(world.members)
    if world.rank == 0:
        print("\n".join(map(str, world.losses)), flush=True)
    print(f"rank {own} ended well; kernels were waited for {report.waited_seconds:.2f} s", flush=True)
