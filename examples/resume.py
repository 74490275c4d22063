"""Training that can be killed at any time, and resumes when the same command is run again.

    adaptive run -n 2 examples/resume.py --kill-after 100      as if the machine failed
    adaptive run -n 4 examples/resume.py                       resumes, here on more workers

Every epoch stores a checkpoint in runs/resume, written in the background. Incomplete checkpoints are never read. The
number of examples continues as if nothing had happened: each example is used once per epoch, on any number of workers.
To start from the beginning, delete the folder. The contents and guarantees of checkpoints are in docs/checkpoints.md.
"""

import argparse
import os
import signal
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import adaptive as ad
import collectives as comm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--run", default="runs/resume", help="the folder of this run's checkpoints")
parser.add_argument("--epochs", type=int, default=30, help="of the whole training, whatever was done before")
parser.add_argument("--kill-after", type=int, metavar="STEP", help="be killed then, or when there is a checkpoint")
args = parser.parse_args()

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(pixels))
digits = {"x": (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1), "y": labels.astype(np.int32)}
train, test = ({key: rows[part] for key, rows in digits.items()} for part in np.split(order, [1437]))


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.Conv(64, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


net, tx = ConvNet(), optax.adam(1e-3)
params = net.init(jax.random.key(0), train["x"][:1])


def loss_fn(params, batch):
    logits = net.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def driver(state, batch):
    params, opt = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt = tx.update(comm.all_reduce(grads), opt, params)
    return (optax.apply_updates(params, updates), opt), {"loss": comm.all_reduce(loss)}


def accuracy(state, batch):
    return jnp.mean(net.apply(state[0], batch["x"]).argmax(-1) == batch["y"])


with comm.world() as world:
    show = partial(print, flush=True) if world.rank == 0 else lambda *_: None
    program = ad.Program(driver, (params, tx.init(params)), train, global_batch=64, world=world)
    program.restore(args.run, missing_ok=True)
    show(f"begins in epoch {program.epoch}, after step {program.steps}, on {world.size} workers")
    for report in program.run(until_epoch=args.epochs, checkpoint=ad.Checkpoints(args.run, every="1 epoch")):
        if args.kill_after and report.step >= args.kill_after and any(Path(args.run).glob("0*")):
            os.kill(os.getpid(), signal.SIGKILL)
        if report.examples % len(train["x"]) < report.global_batch:  # this step ended an epoch
            show(f"epoch {report.epoch:>3}   step {report.step:>4}   loss {report.metrics['loss']:.4f}")
    show(f"test accuracy {program.evaluate(accuracy, test):.2%} after {program.epoch} epochs")
