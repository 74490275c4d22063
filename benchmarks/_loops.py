"""The training steps that are timed: models, and one step written by hand and as a driver."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

import adaptive as ad
import collectives as comm
import controllers as ctrl
import monitors as mon

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from _models import ConvNet

RANKS = MPI.COMM_WORLD
OPTIMIZER = optax.adam(1e-3)
N_EXAMPLES = 4096


class Model(NamedTuple):
    """What is trained, on what, and how much of it a rank takes in a step."""

    name: str
    params: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    data: Any
    local_batch: int


def models() -> list[Model]:
    """Nothing to compute; a small conv net at two sizes; large matrices at two sizes."""
    return [
        empty(8),
        conv_net("conv net, about 5 ms", 64),
        conv_net("conv net, about 20 ms", 256),
        large_matrices("large matrices, about 5 ms", 32),
        large_matrices("large matrices, about 10 ms", 256),
    ]


def empty(local_batch: int) -> Model:
    """One parameter, one number per example."""
    return Model(
        "empty",
        {"w": jnp.zeros(())},
        lambda params, batch: ((params["w"] - batch["x"]) ** 2).mean(),
        {"x": np.zeros(N_EXAMPLES, np.float32)},
        local_batch,
    )


def conv_net(name: str, local_batch: int) -> Model:
    """The examples' conv net: 78 thousand parameters in 8 leaves, the largest of 216 kB."""
    net, rng = ConvNet(10), np.random.default_rng(0)
    data = {
        "image": rng.random((N_EXAMPLES, 8, 8, 1), np.float32),
        "label": rng.integers(0, 10, N_EXAMPLES).astype(np.int32),
    }
    return Model(name, net.init(jax.random.key(0), data["image"][:1]), _cross_entropy_of(net.apply), data, local_batch)


def large_matrices(name: str, local_batch: int) -> Model:
    """Three layers of 512 x 512: 0.8 million parameters, most of them in leaves of 1 MiB."""
    rng, width = np.random.default_rng(0), 512
    data = {
        "image": rng.random((N_EXAMPLES, width), np.float32),
        "label": rng.integers(0, 10, N_EXAMPLES).astype(np.int32),
    }
    widths = [width, width, width, width, 10]
    params = [
        {"w": jnp.asarray(rng.normal(size=(i, o)) / np.sqrt(i), jnp.float32), "b": jnp.zeros(o)}
        for i, o in itertools.pairwise(widths)
    ]

    def apply(params, x):
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    return Model(name, params, _cross_entropy_of(apply), data, local_batch)


def _cross_entropy_of(apply: Callable) -> Callable:
    def loss_fn(params, batch):
        logits = apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    return loss_fn


class ByHand:
    """What a careful user of JAX and mpi4py writes: a jitted gradient into one flat buffer, one Allreduce in place, a
    jitted update. A step is made of the methods below it, so that each can be timed.
    """

    def __init__(self, model: Model):
        params, loss_fn = model.params, model.loss_fn
        flat, unravel = ravel_pytree(params)

        @jax.jit
        def gradient(params, batch):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            return jnp.concatenate([ravel_pytree(grads)[0], loss[None]])

        @jax.jit
        def update(params, opt_state, total):
            updates, opt_state = OPTIMIZER.update(unravel(total[:-1] / RANKS.size), opt_state, params)
            return optax.apply_updates(params, updates), opt_state, total[-1] / RANKS.size

        self.gradient, self.update = gradient, update
        self.model, self.params, self.opt_state = model, params, OPTIMIZER.init(params)
        self.buffer = np.empty(flat.size + 1, np.float32)
        self.order, self.at = np.random.default_rng(0).permutation(N_EXAMPLES), 0

    def steps(self, count: int) -> jax.Array:
        for _ in range(count):
            batch = self.fetch()
            self.receive(self.gradient(self.params, batch))
            self.exchange()
            self.params, self.opt_state, loss = self.update(self.params, self.opt_state, self.buffer)
        return loss

    def fetch(self) -> Any:
        local = self.model.local_batch
        start = (self.at + RANKS.rank * local) % (N_EXAMPLES - local)
        self.at += RANKS.size * local
        return jax.tree.map(lambda a: a[self.order[start : start + local]], self.model.data)

    def receive(self, sent: jax.Array) -> None:
        np.copyto(self.buffer, sent)

    def exchange(self) -> None:
        RANKS.Allreduce(MPI.IN_PLACE, self.buffer)


def program(model: Model, world: Any, *, monitored: bool) -> ad.Program:
    """The same training step as a driver, with or without the noise scale and balancing; warmed up."""

    def driver(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(model.loss_fn)(params, batch)
        avg_grads = comm.all_reduce(grads)
        metrics = {"loss": comm.all_reduce(loss)}
        if monitored:
            metrics["noise"] = mon.noise_scale(grads, avg_grads).scale
            ctrl.hook(ctrl.balance(), comm.all_gather(mon.compute_seconds()), every=10)
        updates, opt_state = OPTIMIZER.update(avg_grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), metrics

    state = (model.params, OPTIMIZER.init(model.params))
    # The same kernel calls as by hand: one per batch, and of that size. Balancing works, but has no room to move, since
    # what is to be seen is what its work costs, and not what other sizes do.
    local = model.local_batch
    sizes = {"global_batch": local * world.size, "max_local_batch": local, "deterministic": True}
    made = ad.Program(driver, state, model.data, world=world, **sizes)
    made.warm_up()
    return made
