"""A linear regression, its gradient in numpy, and what the workers of a program were given and have."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

PARAMS = {"w": np.full(4, 0.1), "b": np.zeros(())}
FIRST = np.array([0, 0.1, 0.1, 0.1, 0.1])  # as a vector (b, w…)


def data(examples: int = 240) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(examples, 4))
    return {"x": x, "y": x @ np.arange(4.0) + rng.normal(size=examples)}


def mean_loss(params: Any, batch: Any) -> Any:
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


def gradient(v: np.ndarray, batch: Any) -> np.ndarray:
    """The gradient of `mean_loss` at a vector (b, w…)."""
    x, rest = batch["x"], batch["x"] @ v[1:] + v[0] - batch["y"]
    return np.concatenate([[2 * rest.mean()], 2 * rest @ x / len(x)])


def vector(params: Any) -> np.ndarray:
    return np.concatenate([[np.asarray(params["b"])], np.asarray(params["w"])])


def steps(program: Any, count: int) -> Any:
    """Take steps, and yield the workers' batches of each."""
    seen, take = [], program._parts.stream.take

    def taken(*args, **options):
        share = take(*args, **options)
        seen.append([jax.tree.map(np.asarray, batch) for batch in share.batches])
        return share

    program._parts.stream.take = taken
    for _ in range(count):
        program.step()
        yield seen[-1]


def states(program: Any) -> list[Any]:
    """Every worker's state."""
    return [program._parts.state_as_given(leaves) for leaves in program._parts.engine.states]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
