"""On a GPU the next step's kernels run while Python is busy between two steps, as in a loop that does not wait.

    python benchmarks/dispatched_ahead.py [--write]

A perceptron of two layers of 4096 on one worker, in blocks of steps that alternate: with and without dispatching the
next step's microbatches ahead, and by hand in one jitted function, not waiting, or waiting for each loss. Between two
steps the loop does nothing, or sleeps for three milliseconds, as for a log or an evaluation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import alternate, readable, report, summary

import adaptive as ad
import collectives as comm

AHEAD, NOT_AHEAD = "ours", "ours, not dispatched ahead"
HAND, WAITS = "by hand", "by hand, each loss awaited"
FEATURES, LARGEST = 256, 8192


def loss_fn(weights: Any, batch: Any) -> jax.Array:
    """Return the loss."""
    x = batch["x"] @ weights[0]
    for w in weights[1:]:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def updated(weights: Any, grads: Any) -> Any:
    """Return the weights after a step of SGD."""
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads)


def driver(weights: Any, batch: Any) -> Any:
    """Take a training step."""
    loss, grads = jax.value_and_grad(loss_fn)(weights, batch)
    return updated(weights, comm.all_reduce(grads)), {"loss": comm.all_reduce(loss)}


@jax.jit
def by_hand(weights: Any, batch: Any) -> Any:
    """Take the same step in one program."""
    loss, grads = jax.value_and_grad(loss_fn)(weights, batch)
    return updated(weights, grads), loss


def initial(width: int) -> Any:
    """Return the weights."""
    rng = np.random.default_rng(0)
    shapes = ((FEATURES, width), (width, width), (width, width))
    return [jnp.asarray(rng.standard_normal(shape, np.float32) / 64) for shape in shapes]


def losses_by_hand(weights: Any, data: Any, batch: int) -> Iterator[jax.Array]:
    """Yield the loss of each step."""
    at = 0
    while True:
        at = (at + batch) % (len(data["x"]) - batch + 1)
        weights, loss = by_hand(weights, {"x": data["x"][at : at + batch]})
        yield loss


def measured(batch: int, width: int, pause: float, rounds: int, block: int) -> list[dict[str, object]]:
    """Return a row for each way: the seconds of a step."""
    data = {"x": np.random.default_rng(0).standard_normal((2 * LARGEST, FEATURES), np.float32)}
    options = {"global_batch": batch, "resizable": False, "deterministic": True}
    with ad.Program(driver, lambda: initial(width), data, **options) as program:
        ours = (step.metrics["loss"] for step in program.run(steps=1 << 30))
        for _ in range(10):
            next(ours)
        steady = program._parts.engine._steady
        could = steady.runs_ahead

        def of_ours(ahead: bool) -> Callable[[], jax.Array]:
            def step() -> jax.Array:
                steady.runs_ahead = ahead and could
                return next(ours)

            return step

        plain, waited = (losses_by_hand(initial(width), data, batch) for _ in range(2))
        steps = {
            AHEAD: of_ours(True),
            NOT_AHEAD: of_ours(False),
            HAND: lambda: next(plain),
            WAITS: lambda: jax.block_until_ready(next(waited)),
        }
        calls = {name: lambda s=step: _block(s, pause, block) for name, step in steps.items()}
        seconds = {name: s / block for name, s in alternate(calls, rounds).items()}
    pauses = readable(pause) if pause else "none"
    return [{"batch": batch, "pause": pauses, **row.cells()} for row in summary(seconds, HAND)]


def _block(step: Callable[[], jax.Array], pause: float, block: int) -> jax.Array:
    for _ in range(block):
        loss = step()
        if pause:
            time.sleep(pause)
    return loss


def main() -> None:
    """Measure and report."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--block", type=int, default=20, help="steps that are timed together")
    arguments.add_argument("--width", type=int, default=4096)
    arguments.add_argument("--write", action="store_true")
    args = arguments.parse_args()
    rows = [
        row
        for batch in (LARGEST // 64, LARGEST)
        for pause in (0.0, 0.003)
        for row in measured(batch, args.width, pause, args.rounds, args.block)
    ]
    notes = [f"One worker on {jax.devices()[0].device_kind}; {args.rounds} rounds of {args.block} steps. SGD."]
    report("A pause between two steps", rows, "dispatched_ahead.md" if args.write else None, notes)


if __name__ == "__main__":
    main()
