"""Handwritten digits by a convolutional net of flax linen, with batch norm and random shifts, on any number of workers.

    adaptive run -n 2 examples/batch_norm.py
    python examples/batch_norm.py

It differs from a program of 112 lines for one device in 39 lines. With `axis_name="workers"`, a layer's means are over
all examples of the step, those of all workers and microbatches, and gradients flow through these means; docs/models.md
has the reasons and the costs. Each image has random numbers of its own. So a step does not depend on the split of its
batch, which `program.check()` verifies. The batch grows after some epochs; training stops when the test accuracy no
longer improves, and the best state is used.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits

import adaptive as ad
import collectives as comm
import controllers as ctrl

epochs, patience = 30, 6
batch_size, late_batch_size, late_epoch = 64, 192, 10
out = "runs/batch_norm"

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(pixels))
digits = {
    "image": (pixels / 16).astype(np.float32)[order].reshape(-1, 8, 8, 1),
    "label": labels[order].astype(np.int32),
}
train, test = ({name: a[part] for name, a in digits.items()} for part in (slice(1437), slice(1437, None)))


class Net(nn.Module):
    @nn.compact
    def __call__(self, image, train, momentum=0.9):
        x = image
        for width in (16, 32):
            x = nn.Conv(width, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=momentum, axis_name="workers")(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


class TrainState(train_state.TrainState):
    batch_stats: dict


def shifted(image, key):
    """Return the images, each shifted by at most one pixel."""
    corners = jax.random.randint(key, (len(image), 2), 0, 3)
    padded = jnp.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jax.vmap(lambda x, at: jax.lax.dynamic_slice(x, (at[0], at[1], 0), (8, 8, 1)))(padded, corners)


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


net = Net()
variables = net.init(jax.random.key(0), train["image"][:1], train=False)
state = TrainState.create(apply_fn=net.apply, tx=optax.adam(1e-2), **variables)


def driver(state, batch):
    image = shifted(batch["image"], ad.batch_key())
    momentum = 0.9 ** (ad.global_batch() / batch_size)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = net.apply(variables, image, train=True, momentum=momentum, mutable=["batch_stats"])
        return cross_entropy(logits, batch), changed["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=comm.all_reduce(grads), batch_stats=batch_stats)
    ctrl.hook(ctrl.schedule({0: batch_size, late_epoch: late_batch_size}, by="epochs"))
    return state, {"loss": comm.all_reduce(loss)}


def predict(state, batch):
    return net.apply({"params": state.params, "batch_stats": state.batch_stats}, batch["image"], train=False)


def evaluation(state, batch):
    logits = predict(state, batch)
    return {"loss": cross_entropy(logits, batch), "accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


world = comm.world()
show = print if world.rank == 0 else lambda *_: None
program = ad.Program(driver, state, train, global_batch=batch_size, world=world)
show(program.check())
checkpoints = ad.Checkpoints(out, every="1 epoch", keep_best=("val.accuracy", "max"))
best, since = 0.0, 0
for report in program.run(until_epoch=epochs, checkpoint=checkpoints):
    if not report.epoch_ended:
        continue
    val = program.evaluate(evaluation, test, log="val")
    loss = report.metrics["loss"]
    show(f"epoch {report.epoch}: batch {report.global_batch}, loss {loss:.4f}, accuracy {val['accuracy']:.2%}")
    since += 1
    if val["accuracy"] > best:
        best, since = val["accuracy"], 0
    if since == patience:
        program.stop()

program.restore(checkpoints.best())
predicted = program.evaluate(lambda state, batch: predict(state, batch).argmax(-1), test, op="rows")
show(f"test accuracy {program.evaluate(evaluation, test)['accuracy']:.2%}")
show(f"wrong: {np.flatnonzero(predicted != test['label'])}")
world.close()
