"""The model of the jobs of `chaos.py`, and the plain loop with the expected results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import collectives.strategies as sync
from tests.program.problems import stream

EXAMPLES, FEATURES = 160, 6


def data(count: int = EXAMPLES) -> dict[str, np.ndarray]:
    """Examples that know their numbers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, FEATURES))
    y = np.tanh(x @ rng.normal(size=FEATURES)) + 0.3 * rng.normal(size=count)
    return {"x": x, "y": y, "number": np.arange(count)}


def begun() -> dict[str, Any]:
    """The model before the first step: weights, their momentum, and a memory of all gradients in their order."""
    return {"w": jnp.linspace(-1, 1, FEATURES), "momentum": jnp.zeros(FEATURES), "memory": jnp.zeros(FEATURES)}


def gradient(model: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    """Of the mean loss over a batch."""
    return {"w": jax.grad(lambda w: _losses(w, batch).mean())(model["w"])}


def made_step(model: dict[str, Any], grads: dict[str, Any]) -> dict[str, Any]:
    """The model after a step."""
    momentum = 0.9 * model["momentum"] + grads["w"]
    return {
        "w": model["w"] - 0.01 * momentum,
        "momentum": momentum,
        "memory": 1.001 * model["memory"] + grads["w"],
    }


def value_and_grad(w: Any, batch: dict[str, Any]) -> Any:
    """Return the mean loss over a batch, and its gradient; for strategies."""
    return jax.value_and_grad(lambda w: _losses(w, batch).mean())(w)


def strategy_of(name: str, capacity: int) -> sync.Strategy | None:
    """Return the strategy that is trained beside the plain loop's model."""
    inner, outer = optax.sgd(0.01, momentum=0.5), optax.sgd(0.7, momentum=0.5, nesterov=True)
    if name == "diloco":
        return sync.diloco(inner, outer, 2, wire="4bit")
    if name == "islands":
        middle = (capacity + 1) // 2
        return sync.islands(inner, outer, 3, [range(middle), range(middle, capacity)])
    return sync.quorum(inner, outer, 2) if name == "quorum" else None


def mean_loss(w: Any, count: int = EXAMPLES) -> float:
    """Return the mean loss over all examples."""
    with jax.enable_x64(True):
        return float(_losses(np.asarray(w, np.float64), data(count)).mean())


def _losses(w: Any, batch: dict[str, Any]) -> Any:
    return jnp.square(jnp.tanh(batch["x"] @ w) - batch["y"])


def plain_loop(seed: int, batches: Sequence[int], count: int = EXAMPLES) -> dict[str, np.ndarray]:
    """The model after consecutive batches of the stream, in one process, without the library."""
    with jax.enable_x64(True):
        examples, order = data(count), stream(count, seed, sum(batches))
        model, widest = begun(), max(batches)
        ends = np.cumsum(batches)
        numbers = np.zeros((len(batches), widest), int)
        weights = np.zeros((len(batches), widest))
        for row, (end, size) in enumerate(zip(ends, batches, strict=True)):
            numbers[row, :size], weights[row, :size] = order[end - size : end], 1 / size
        x, y = jnp.asarray(examples["x"]), jnp.asarray(examples["y"])

        def step(model: Any, chosen: Any) -> Any:
            which, weight = chosen
            batch = {"x": x[which], "y": y[which]}
            grads = {"w": jax.grad(lambda w: (weight * _losses(w, batch)).sum())(model["w"])}
            return made_step(model, grads), None

        model, _ = jax.jit(lambda m: jax.lax.scan(step, m, (jnp.asarray(numbers), jnp.asarray(weights))))(model)
        return {name: np.asarray(leaf) for name, leaf in model.items()}


def taken(seed: int, batches: Sequence[int], count: int = EXAMPLES) -> np.ndarray:
    """How often each example is to be taken."""
    return np.bincount(stream(count, seed, sum(batches)), minlength=count)
