"""Handwritten digits by a convolutional net of flax linen, with batch norm and random shifts, on one device.

What examples/batch_norm.py is compared with.
"""

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from flax.training import train_state
from sklearn.datasets import load_digits

epochs, patience = 30, 6
batch_size, late_batch_size, late_epoch = 64, 192, 10
out = Path("batch_norm.msgpack")

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
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=momentum)(x))
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


@jax.jit
def train_step(state, batch, key):
    image = shifted(batch["image"], key)
    momentum = 0.9 ** (len(image) / batch_size)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = net.apply(variables, image, train=True, momentum=momentum, mutable=["batch_stats"])
        return cross_entropy(logits, batch), changed["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    return state, {"loss": loss}


@jax.jit
def predict(state, batch):
    return net.apply({"params": state.params, "batch_stats": state.batch_stats}, batch["image"], train=False)


@jax.jit
def evaluation(state, batch):
    logits = predict(state, batch)
    return {"loss": cross_entropy(logits, batch), "accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


def epoch_of(data, epoch):
    rows = np.random.default_rng(epoch).permutation(len(data["label"]))
    size = batch_size if epoch < late_epoch else late_batch_size
    for i in range(0, len(rows) - size + 1, size):
        yield {name: a[rows[i : i + size]] for name, a in data.items()}


key = jax.random.key(0)
best, since = 0.0, 0
for epoch in range(1, epochs + 1):
    for batch in epoch_of(train, epoch - 1):
        key, step_key = jax.random.split(key)
        state, metrics = train_step(state, batch, step_key)
    val = evaluation(state, test)
    print(f"epoch {epoch}: batch {len(batch['label'])}, loss {metrics['loss']:.4f}, accuracy {val['accuracy']:.2%}")
    since += 1
    if val["accuracy"] > best:
        best, since = val["accuracy"], 0
        out.write_bytes(serialization.to_bytes(state))
    if since == patience:
        break

state = serialization.from_bytes(state, out.read_bytes())
predicted = predict(state, test).argmax(-1)
print(f"test accuracy {evaluation(state, test)['accuracy']:.2%}")
print(f"wrong: {np.flatnonzero(predicted != test['label'])}")
