"""Batch normalization over the global batch of a step, on any number of workers, with flax linen and flax nnx.

    adaptive run -n 2 examples/batch_norm.py
    python examples/batch_norm.py --flax nnx

The line that matters is `axis_name="workers"`. With it, a layer's means are over all examples of the step, those of all
workers and microbatches, and gradients flow through these means. The reasons and the costs of this are described in
docs/models.md.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state
from sklearn.datasets import load_digits

import adaptive as ad
import collectives as comm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--flax", choices=["linen", "nnx"], default="linen")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(pixels))
digits = {
    "image": (pixels / 16).astype(np.float32)[order].reshape(-1, 8, 8, 1),
    "label": labels[order].astype(np.int32),
}
train, test = ({name: a[part] for name, a in digits.items()} for part in (slice(1437), slice(1437, None)))


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


# --- linen ------------------------------------------------------------------------------------------------------------


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, image, train):
        x = nn.Conv(16, (3, 3), strides=2)(image)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="workers")(x)
        return nn.Dense(10)(nn.relu(x).reshape(len(x), -1))


class TrainState(train_state.TrainState):
    batch_stats: dict


def of_linen():
    net = LinenNet()
    variables = net.init(jax.random.key(0), train["image"][:1], train=False)
    state = TrainState.create(apply_fn=net.apply, tx=optax.adam(1e-2), **variables)

    def driver(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = net.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
            return cross_entropy(logits, batch), changed["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=comm.all_reduce(grads), batch_stats=batch_stats)  # equal on all workers
        return state, {"loss": comm.all_reduce(loss)}

    def accuracy(state, batch):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        return jnp.mean(net.apply(variables, batch["image"], train=False).argmax(-1) == batch["label"])

    return driver, state, accuracy


# --- nnx --------------------------------------------------------------------------------------------------------------


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, axis_name="workers", rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 16, 10, rngs=rngs)

    def __call__(self, image):
        x = nnx.relu(self.norm(self.conv(image)))
        return self.dense(x.reshape(len(x), -1))


def of_nnx():
    model = NNXNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def driver(state, batch):
        model, optimizer = state  # changed in place, and returned
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch["image"]), batch))(model)
        optimizer.update(model, comm.all_reduce(grads))
        return (model, optimizer), {"loss": comm.all_reduce(loss)}

    def accuracy(state, batch):
        model = nnx.view(state[0], use_running_average=True)
        return jnp.mean(model(batch["image"]).argmax(-1) == batch["label"])

    return driver, (model, optimizer), accuracy


with comm.world() as world:
    show = print if world.rank == 0 else lambda *_: None
    driver, state, accuracy = of_linen() if args.flax == "linen" else of_nnx()
    program = ad.Program(driver, state, train, global_batch=96, world=world)
    show(program.check())
    *_, report = program.run(epochs=args.epochs)
    show(f"loss {float(report.metrics['loss']):.4f} after {program.steps} steps, {report.messages} messages each")
    show(f"test accuracy {program.evaluate(accuracy, test):.2%}")
