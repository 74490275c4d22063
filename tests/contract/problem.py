"""A linear regression whose driver reports which examples each step took, and the same descent in numpy."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import adaptive as ad
import collectives as comm

EXAMPLES, FEATURES, RATE = 48, 3, 0.1
START = np.array([0.3, -0.2, 0.1])


def make_data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, FEATURES))
    return {"x": x, "y": x.sum(1) + rng.normal(size=EXAMPLES), "id": np.arange(EXAMPLES, dtype=np.int32)}


DATA = make_data()


def mean_loss(w: Any, batch: Any) -> Any:
    """Mean squared error; `batch` and `w` may be arrays of JAX or of numpy."""
    return ((batch["x"] @ w - batch["y"]) ** 2).mean()


def taken(batch: Any) -> jax.Array:
    """How often all workers together take each example in this step; shape=(EXAMPLES,). Replicated."""
    return comm.all_reduce(jnp.zeros(EXAMPLES, jnp.int32).at[batch["id"]].add(1), op="sum")


def descend(w: jax.Array, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A step of gradient descent."""
    loss, grad = comm.all_reduce(jax.value_and_grad(mean_loss)(w, batch))
    return w - RATE * grad, {"loss": loss, "taken": taken(batch)}


def rows_of(counts: Any) -> np.ndarray:
    """The examples of a step, each as often as it was taken."""
    return np.repeat(np.arange(EXAMPLES), np.asarray(counts))


def gradient(w: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The gradient of `mean_loss` over these examples, in numpy."""
    x, y = DATA["x"][rows], DATA["y"][rows]
    return 2 * x.T @ (x @ w - y) / len(rows)


def plain_descent(steps: Iterable[Any], w: np.ndarray = START, rates: Sequence[float] | None = None) -> np.ndarray:
    """Descend in numpy over the examples that each step took; `steps`: counts of each example, by step."""
    for number, counts in enumerate(steps):
        w = w - (rates[number] if rates else RATE) * gradient(w, rows_of(counts))
    return w


def check_descent(w: Any, reports: Sequence[ad.Report]) -> None:
    """Check that a run of `descend` is the loop in numpy over the same examples, and took each once an epoch."""
    steps = [np.asarray(report.metrics["taken"]) for report in reports]
    assert [counts.sum() for counts in steps] == [report.global_batch for report in reports]
    check_epochs(steps)
    np.testing.assert_allclose(w, plain_descent(steps), rtol=0, atol=1e-12)


def check_epochs(steps: Sequence[np.ndarray]) -> None:
    """Check that each example was taken exactly once in each complete epoch, and at most once more."""
    total = np.sum(steps, axis=0)
    epochs = total.sum() // EXAMPLES
    assert ((total == epochs) | (total == epochs + 1)).all(), total


def one_worker(batches: Iterable[int], seed: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """The state and the examples of each step of one worker, with these global batches."""
    return one_run(tuple(batches), seed)


@functools.cache
def one_run(sizes: tuple[int, ...], seed: int) -> tuple[np.ndarray, list[np.ndarray]]:
    found = []
    options = {"seed": seed, "deterministic": True, "resizable": len(set(sizes)) > 1}
    with ad.Program(descend, START, DATA, global_batch=sizes[0], world=comm.SoloWorld(), **options) as program:
        for size in sizes:
            if size != program.global_batch:
                program.rescale(global_batch=size)
            found.append(np.asarray(program.step().metrics["taken"]))
        return np.asarray(program.state), found


COUNTED = {"w": START, "taken": np.zeros(EXAMPLES, np.int32)}  # a state for `descend_and_count`


def descend_and_count(state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    """A step of `descend` that adds up in the state how often each example was taken."""
    w, metrics = descend(state["w"], batch)
    return {"w": w, "taken": state["taken"] + metrics["taken"]}, metrics


def check_counted(state: Any, batches: Sequence[int]) -> None:
    """Check a state of `descend_and_count` against one worker with these global batches."""
    w, examples = one_worker(batches)
    np.testing.assert_array_equal(state["taken"], np.sum(examples, axis=0))
    check_epochs(examples)
    np.testing.assert_allclose(state["w"], w, rtol=0, atol=1e-12)
