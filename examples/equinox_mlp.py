"""An equinox model, with dropout per example, on scikit-learn's digits.

    adaptive run -n 2 examples/equinox_mlp.py
    python examples/equinox_mlp.py

An equinox model holds functions besides its arrays. `eqx.partition` separates them: the arrays are the state, and the
driver closes over the rest.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(pixels))
x, y = (pixels / 16).astype(np.float32)[order], labels[order].astype(np.int32)
train, test = {"x": x[:1437], "y": y[:1437]}, {"x": x[1437:], "y": y[1437:]}


class Net(eqx.Module):
    hidden: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    mlp: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(64, 128, key=first)
        self.dropout = eqx.nn.Dropout(0.2)
        self.mlp = eqx.nn.MLP(128, 10, width_size=64, depth=1, key=second)  # its activation is a function

    def __call__(self, x, key=None):  # of one example
        return self.mlp(self.dropout(jax.nn.relu(self.hidden(x)), key=key))


params, static = eqx.partition(Net(jax.random.key(0)), eqx.is_array)
tx = optax.adam(1e-3)


def loss_fn(params, batch):
    model = eqx.combine(params, static)
    logits = jax.vmap(model)(batch["x"], key=ad.example_keys())
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def driver(state, batch):
    params, opt = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    avg_grads = comm.all_reduce(grads)
    noise = mon.noise_scale(grads, avg_grads)
    ctrl.hook(ctrl.noise_batch(max_batch=512), noise, every=20)
    updates, opt = tx.update(avg_grads, opt, params)
    return (eqx.apply_updates(params, updates), opt), {"loss": comm.all_reduce(loss), "noise": noise.scale}


def accuracy(state, batch):
    model = eqx.nn.inference_mode(eqx.combine(state[0], static))
    return jnp.mean(jax.vmap(model)(batch["x"]).argmax(-1) == batch["y"])


with comm.world() as world:
    show = print if world.rank == 0 else lambda *_: None
    program = ad.Program(driver, (params, tx.init(params)), train, global_batch=64, world=world)
    for report in program.run(epochs=args.epochs):
        if report.step % 50 == 0:
            show(f"step {report.step:>4}   loss {report.metrics['loss']:.4f}   batch {report.batch_sizes}")
    show(f"test accuracy {program.evaluate(accuracy, test):.2%}")
