"""Handwritten digits by a convolutional net: the loop of flax nnx's MNIST tutorial, on any number of workers.

    adaptive run -n 2 examples/nnx.py
    python examples/nnx.py

After docs_nnx/mnist_tutorial of flax (Apache-2.0). It differs from that program in 20 lines: layers and
random numbers use the global batch, gradients and metrics are reduced, and a program replaces the loop over batches. A
step is the same on any number of workers, as `program.check()` verifies.
"""

from functools import partial

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import adaptive as ad
import collectives as comm

train_steps = 300
eval_every = 100
batch_size = 32

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(pixels))
image = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)[order]
label = labels.astype(np.int32)[order]
train = {"image": image[:1437], "label": label[:1437]}
test = {"image": image[1437:], "label": label[1437:]}


def batches(data, steps, rng):
    for step in range(steps):
        rows = rng.choice(len(data["label"]), batch_size) if rng else slice(step * batch_size, (step + 1) * batch_size)
        yield {name: array[rows] for name, array in data.items()}


test_ds = list(batches(test, len(test["label"]) // batch_size, None))


class CNN(nnx.Module):
    """A simple CNN model."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(32, axis_name="workers", rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(64, axis_name="workers", rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(256, 256, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.025)
        self.linear2 = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x, rngs: nnx.Rngs | None = None):
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)  # flatten
        x = nnx.relu(self.dropout2(self.linear1(x), rngs=rngs))
        return self.linear2(x)


model = CNN(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(0.005, 0.9), wrt=nnx.Param)
metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
rngs = nnx.Rngs(0)


def loss_fn(model: CNN, rngs: nnx.Rngs, batch):
    logits = model(batch["image"], rngs)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch["label"]).mean()
    return loss, logits


def train_step(state, batch):
    """Train for a single step."""
    model, optimizer, zero = state
    metrics, rngs = nnx.clone(zero), nnx.Rngs(ad.batch_key())
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, rngs, batch)
    metrics.update(loss=comm.all_reduce(loss), logits=logits, labels=batch["label"])
    optimizer.update(model, comm.all_reduce(grads))
    return state, comm.all_reduce(metrics, op="sum")


@nnx.jit
def eval_step(model: CNN, metrics: nnx.MultiMetric, rngs: nnx.Rngs, batch):
    loss, logits = loss_fn(model, rngs, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


world = comm.world()
program = ad.Program(train_step, (model, optimizer, metrics), train, global_batch=batch_size, world=world)
for step, report in enumerate(program.run(steps=train_steps), start=1):
    metrics = optax.tree.add(metrics, report.metrics)

    if step % eval_every == 0 and world.rank == 0:
        print(
            f"[train] step: {step}, " + ", ".join(f"{name}: {value:.4f}" for name, value in metrics.compute().items())
        )
        metrics.reset()

        model = program.state[0]
        model.eval()
        for test_batch in test_ds:
            eval_step(model, metrics, rngs, test_batch)
        print(
            f"[test]  step: {step}, " + ", ".join(f"{name}: {value:.4f}" for name, value in metrics.compute().items())
        )
        metrics.reset()
world.close()
