"""Listing 1 of KungFu's workshop paper, literally: the gradient noise scale determines the number of workers.

    adaptive run -n 4 examples/elastic.py

Four processes start; one of them works, and the others are in reserve until they are requested. If a process dies or
hangs, training continues without it. Try this from another terminal, with a PID that is printed at the start:

    kill -9 PID        the process is lost; the others continue at once, with the same global batch
    kill -STOP PID     the process is reported after --hang-timeout seconds, and killed, and so lost, after twice that

The same without a terminal, for worker 0 after step 190 and worker 2 after step 210:

    adaptive run -n 4 examples/elastic.py --kill 0@190 --stop 2@210

If all processes share few cores, set PJRT_NPROC=1 in the environment, which gives each process one compute thread.
Instead of `adapt_workers` there is a policy, `ctrl.noise_workers(64)`, which uses the bounds of the noise scale and so
does not follow its fluctuations.
"""

import argparse
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _data import load
from _models import ConvNet
from flax.training.train_state import TrainState

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon


def at_step(text):  # "2@60"
    worker, step = map(int, text.split("@"))
    return worker, step


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--workers", type=int, default=1, help="how many there are at first")
parser.add_argument("--examples-per-worker", type=int, default=64, help="that keep a worker busy")
parser.add_argument("--every", type=int, default=20, help="steps between two looks at the noise scale")
parser.add_argument("--hang-timeout", type=float, default=5, help="seconds until a worker that hangs is named")
parser.add_argument("--kill", type=at_step, nargs="*", default=[], metavar="WORKER@STEP", help="who kills itself, when")
parser.add_argument("--stop", type=at_step, nargs="*", default=[], metavar="WORKER@STEP", help="who stops itself, when")
args = parser.parse_args()

train, test, classes, name = load("digits")
net = ConvNet(classes)
params = net.init(jax.random.key(0), train["image"][:1])
state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3))


def loss_fn(params, batch):
    logits = net.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def accuracy(state, batch):
    return jnp.mean(net.apply(state.params, batch["image"]).argmax(-1) == batch["label"])


def adapt_workers(control, noise):  # plain Python, runs on every worker after a step
    n_peers = np.clip(noise.scale / args.examples_per_worker, 1, control.most_workers).round()
    control.barrier()
    control.rescale(workers=n_peers, global_batch=n_peers * args.examples_per_worker)
    control.barrier()


def driver(state, batch):  # plain JAX
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    avg_grads = comm.all_reduce(grads)  # mean over examples, not mean of means
    noise = mon.noise_scale(grads, avg_grads)  # adds 12 bytes to the gradients' message
    ctrl.hook(adapt_workers, noise, every=args.every)
    state = state.apply_gradients(grads=avg_grads)
    return state, {"loss": comm.all_reduce(loss), "noise": noise.scale}


def show(line):
    if world.rank == 0:  # looked up each time: if rank 0 is lost, another process becomes rank 0
        print(line, flush=True)


def harm(step):
    """Kill or stop this process as the command line says."""
    for victims, number in ((args.kill, signal.SIGKILL), (args.stop, signal.SIGSTOP)):
        if any((worker, step) in victims for worker in world.workers):
            os.kill(os.getpid(), number)


with comm.world(workers=args.workers, hang_timeout=args.hang_timeout) as world:
    program = ad.Program(driver, state, train, global_batch=args.workers * args.examples_per_worker, world=world)
    pids = world.all_gather_bytes(f"worker {world.workers[0]} is process {os.getpid()}".encode())
    show("\n".join(map(bytes.decode, pids)))

    show(f"\n{'step':>5} {'epoch':>6} {'noise':>6}   batch sizes")
    before = None
    for report in program.run(epochs=args.epochs):  # in reserve this waits until the process joins
        if (report.members, report.batch_sizes) != before:
            before = report.members, report.batch_sizes
            sizes = [
                str(size) if worker_slot in report.members else "-"
                for worker_slot, size in enumerate(report.batch_sizes)
            ]
            figures = f"{report.step:>5} {report.epoch:>6} {report.metrics['noise']:>6.0f}"
            show(f"{figures}   {' + '.join(sizes)} = {report.global_batch}")
        for note in report.notes:  # workers that joined, left or were lost
            show(f"{'':<21} {note}")
        harm(report.step)

    correct = program.evaluate(accuracy, test)  # on all processes: those in reserve have received the state
    show(f"\ntest accuracy  {correct:.2%} after {program.steps} steps, {program.epoch} epochs")
    show(f"workers        {len(program.members)} at the end; {len(world.losses)} processes lost")
