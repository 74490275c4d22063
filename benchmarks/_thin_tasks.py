"""What is trained over thin links, and in which formats: a net of dense layers on digits, a transformer on text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import _language_model as language
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import adaptive as ad
import collectives as comm
import collectives.strategies as sync


class Task(NamedTuple):
    """A model, its data, and how workers train it."""

    name: str
    init: Callable[[int], Any]  # parameters, of a seed
    loss_fn: Callable[[Any, Any], jax.Array]
    accuracy: Callable[[Any, Any], jax.Array]  # of parameters and a batch; between 0 and 1
    train: Any
    test: Any
    size: int  # examples of a worker in a local step
    inner: optax.GradientTransformation

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(x.size for x in jax.tree.leaves(self.init(0)))

    def program(self, world: Any, strategy: sync.Strategy, steps: int, seed: int = 0) -> ad.Program:
        """Return a program whose step takes `steps` local steps on each worker."""

        def driver(state: Any, batch: Any) -> Any:
            state, loss = strategy.step(state, jax.value_and_grad(self.loss_fn), batch)
            return state, {"loss": comm.all_reduce(loss)}

        options = {"world": world, "per_worker_state": strategy.per_worker_state, "resizable": False, "seed": seed}
        batch = world.size * self.size * steps
        return ad.Program(driver, strategy.init(self.init(seed)), self.train, global_batch=batch, **options)


class Net(nn.Module):
    """Three hidden layers of 512: 0.56 million parameters."""

    classes: int

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = image.reshape(len(image), -1)
        for _ in range(3):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(self.classes)(x)


def digits() -> Task:
    """Return the classification of digits."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    from _data import load

    data = load("digits")
    net = Net(data.classes)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = net.apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def accuracy(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(net.apply(params, batch["image"]).argmax(-1) == batch["label"])

    def init(seed: int) -> Any:
        return net.init(jax.random.key(seed), data.train["image"][:1])

    return Task("digits", init, loss_fn, accuracy, data.train, data.test, 16, optax.adam(1e-3))


def text() -> Task:
    """Return the prediction of the next character of Python's documentation: 0.24 million parameters."""
    train, test, n_characters = language.text()

    def accuracy(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(language.logits_of(params, batch).argmax(-1) == batch["codes"][:, 1:])

    def init(seed: int) -> Any:
        return language.init(seed, n_characters)

    return Task("text", init, language.loss_fn, accuracy, train, test, 4, optax.adam(2e-3))


TASKS = {"digits": digits, "text": text}
OUTER = {
    "0.7, momentum 0.9": optax.sgd(0.7, momentum=0.9, nesterov=True),
    "0.7, momentum 0.5": optax.sgd(0.7, momentum=0.5, nesterov=True),
    "1.0, no momentum": optax.sgd(1.0),
}


class Format(NamedTuple):
    """A format on the wire: the outer optimizer it is judged with, and its bars.

    Attributes:
      points: the most that accuracy may be below that of float32, in percentage points.
      nbytes, seconds: the most that an exchange may take, relative to float32.
    """

    wire: Any
    outer: str
    points: float
    nbytes: float
    seconds: float


FLOAT32 = "float32"
FORMATS = {
    FLOAT32: Format(None, "0.7, momentum 0.5", 0, 1, 1),
    "4bit": Format("4bit", "0.7, momentum 0.5", 0.3, 0.14, 0.15),
    "2bit": Format("2bit", "0.7, momentum 0.5", 1, 0.07, 0.15),
}
