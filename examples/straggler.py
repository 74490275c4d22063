"""One worker temporarily shares its core with another busy process; with and without balancing.

    adaptive run -n 2 examples/straggler.py

Each rank is pinned to its own core. Two programs with the same driver alternate: one keeps equal batches, the other
balances them. After a while the last rank starts a busy process on its core, and later ends it.
"""

import argparse
import os
import subprocess
import sys
from contextlib import contextmanager

CORES = sorted(os.sched_getaffinity(0))
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", 0)))
CORE = CORES[RANK % len(CORES)]
os.sched_setaffinity(0, {CORE})  # before JAX starts its threads

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from _data import load  # noqa: E402
from _models import ConvNet  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

import adaptive as ad  # noqa: E402
import collectives as comm  # noqa: E402
import controllers as ctrl  # noqa: E402
import monitors as mon  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=120, help="steps of each program in each of the three phases")
parser.add_argument("--global-batch", type=int, default=512)
args = parser.parse_args()

train, _, classes, _ = load("digits")
net = ConvNet(classes)
params = net.init(jax.random.key(0), train["image"][:1])
state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3))


def loss_fn(params, batch):
    logits = net.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def static(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=comm.all_reduce(grads)), {"loss": comm.all_reduce(loss)}


def balanced(state, batch):
    seconds = comm.all_gather(mon.compute_seconds())
    ctrl.hook(ctrl.balance(), seconds, every=10)
    return static(state, batch)


@contextmanager
def neighbor(core):
    """Run a busy process on this core during the `with` block."""
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}: pass"
    process = subprocess.Popen([sys.executable, "-c", spin])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def phase(programs, busy):
    """Alternate between the programs, ten steps each, and print the median time of their steps."""
    milliseconds = {name: [] for name in programs}
    for _ in range(args.steps // 10):
        for name, program in programs.items():
            milliseconds[name] += [report.seconds * 1e3 for report in program.run(steps=10)]
    settled = {name: np.median(times[len(times) // 3 :]) for name, times in milliseconds.items()}
    sizes = " + ".join(map(str, programs["balanced"].batch_sizes))
    show(f"{busy:<22} {settled['equal']:>10.1f} {settled['balanced']:>10.1f}   {sizes}")


with comm.world() as world:
    show = print if world.rank == 0 else lambda *_: None
    programs = {
        "equal": ad.Program(static, state, train, global_batch=args.global_batch, world=world),
        "balanced": ad.Program(balanced, state, train, global_batch=args.global_batch, world=world),
    }
    for program in programs.values():
        program.warm_up()
    show(f"{'ms per step':<22} {'equal':>10} {'balanced':>10}   balanced batch sizes at the end")
    phase(programs, "alone")
    if world.rank == world.processes - 1:
        with neighbor(CORE):
            phase(programs, "with a busy neighbor")
    else:
        phase(programs, "with a busy neighbor")
    phase(programs, "alone again")
