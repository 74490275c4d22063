"""A small problem, the loop that solves it without the library, and what the tests do with programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adaptive as ad
import collectives as comm
from tests.relaxed import relaxed_tx

FEATURES, HIDDEN, CLASSES = 6, 8, 3
Params = dict[str, Any]


def make_data(examples: int = 160, seed: int = 0) -> dict[str, np.ndarray]:
    """Points in `CLASSES` overlapping clouds, in the precision in force."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, examples)
    x = rng.normal(size=(examples, FEATURES)) + rng.normal(size=(CLASSES, FEATURES))[label]
    return {"x": np.asarray(jnp.asarray(x)), "label": label.astype(np.int32)}


def make_params(seed: int = 1) -> Params:
    rng = np.random.default_rng(seed)
    return {
        "inner": {"w": jnp.asarray(rng.normal(size=(FEATURES, HIDDEN)) / 2), "b": jnp.zeros(HIDDEN)},
        "outer": {"w": jnp.asarray(rng.normal(size=(HIDDEN, CLASSES)) / 2), "b": jnp.zeros(CLASSES)},
    }


def losses(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    """Cross entropy of each example."""
    inner, outer = params["inner"], params["outer"]
    hidden = jnp.tanh(batch["x"] @ inner["w"] + inner["b"][None])
    logits = hidden @ outer["w"] + outer["b"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def mean_loss(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
    return losses(params, batch).mean()


ADAM = relaxed_tx(optax.adam(0.02))


def adam_state() -> dict[str, Any]:
    params = make_params()
    return {"params": params, "opt": ADAM.init(params)}


def adam_driver(state, batch):
    """A step of Adam on the mean gradient of the workers' examples."""
    loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
    loss, grads = comm.all_reduce((loss, grads))
    updates, opt = ADAM.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}


def descend(state, batch):
    """The smallest driver that trains, with little to compile, for tests of anything else."""
    loss, grad = comm.all_reduce(jax.value_and_grad(lambda s: jnp.square(batch["x"].sum(1) - s).mean())(state))
    return state - 0.1 * grad, {"loss": loss}


def stream(examples: int, seed: int, count: int, shard: int = 0) -> np.ndarray:
    """The first `count` positions of the documented stream: a permutation per epoch, laid end to end."""
    epochs = -(-count // examples)

    def philox(epoch: int) -> np.random.Philox:
        return np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, shard])

    rounds = 16 if examples < 1024 else 8
    keys = [[int(k) for k in philox(e).random_raw(rounds)] for e in range(epochs)]
    return np.array([_place(place, examples, keys[e]) for e in range(epochs) for place in range(examples)])[:count]


def _place(x: int, examples: int, keys: Sequence[int]) -> int:
    """What stands at a place of an epoch: a Feistel network over two radices, in Python's own numbers."""
    a = math.isqrt(examples - 1) + 1
    b = -(-examples // a)

    def mixed(half: int, key: int, radix: int) -> int:
        z = (half ^ key) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 32) * 0x94D049BB133111EB % 2**64
        return (z >> 32) * radix >> 32

    while True:
        left, right = divmod(x, b)
        for one, other in zip(keys[::2], keys[1::2], strict=True):
            left = (left + mixed(right, one, a)) % a
            right = (right + mixed(left, other, b)) % b
        x = left * b + right
        if x < examples:
            return x


@jax.jit
def plain_step(params, opt, batch):
    """A step of Adam, without the library."""
    updates, opt = ADAM.update(jax.grad(mean_loss)(params, batch), opt, params)
    return optax.apply_updates(params, updates), opt


def plain_adam(data: dict[str, np.ndarray], batches: Sequence[int], seed: int) -> Params:
    """Adam in plain optax on consecutive batches of the stream."""
    params, cursor, order = make_params(), 0, stream(len(data["x"]), seed, sum(batches))
    opt = ADAM.init(params)
    for size in batches:
        rows = order[cursor : cursor + size]
        params, opt = plain_step(params, opt, jax.tree.map(lambda a, rows=rows: a[rows], data))
        cursor += size
    return params


def difference(a: Any, b: Any) -> float:
    """The largest difference in any leaf, relative to the leaf's largest element."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    host = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
    return max(float(np.abs(x - y).max() / (np.abs(y).max() or 1.0)) for x, y in host)


def warm(program: ad.Program) -> None:
    """Compile the buckets, and take a step, whose message tells every worker that all have."""
    program.warm_up()
    program.step()


class Compilations(list):
    """Record traces and compilations within the block, in any thread."""

    def __enter__(self):
        self._listen = lambda event, *_, **__: self.append(event) if "compile" in event or "trace" in event else None
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)


def same_everywhere(world: Any, value: Any) -> bool:
    """Whether all processes have the same, to the last bit."""
    leaves = [leaf if isinstance(leaf, str) else np.asarray(leaf).tolist() for leaf in jax.tree.leaves(value)]
    return len(set(world.all_gather_bytes(repr(leaves).encode()))) == 1


def build(driver: Callable, state: Any, data: Any, global_batch: int, **options: Any) -> ad.Program:
    """A program of fixed sizes by default, because most tests need no kernels for buckets."""
    return ad.Program(driver, state, data, global_batch=global_batch, **{"seed": 3, "resizable": False, **options})
