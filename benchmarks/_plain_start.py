"""What `examples/listing_1.py` is without a world: the same data, model and optimizer, in a plain jitted loop."""

import sys
from pathlib import Path

import jax
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from _data import load
from _models import ConvNet
from flax.training.train_state import TrainState

train, _, classes, _ = load("digits")
net = ConvNet(classes)
params = jax.jit(net.init)(jax.random.key(0), train["image"][:1])
state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3))


def loss_fn(params, batch):
    logits = net.apply(params, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@jax.jit
def step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


state, loss = step(state, {name: leaf[:64] for name, leaf in train.items()})
print(f"step 1  loss {float(loss):.4g}", flush=True)
