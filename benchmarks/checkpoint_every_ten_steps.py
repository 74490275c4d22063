"""A checkpoint of 25 million parameters every ten steps: this library's background writer, and orbax's manager.

    python benchmarks/checkpoint_every_ten_steps.py

One worker trains a network of 25 million parameters in four ways: without checkpoints; with
`run(checkpoint=ad.Checkpoints(…, every=10))`; and with `orbax.checkpoint.CheckpointManager` and its default settings,
which saves `program.checkpoint()` in the loop, blocking and asynchronously. Blocks of twenty steps alternate, and are
compared round by round. A block begins and ends five steps after a checkpoint, and at its end waits for unfinished
writes, so that each block pays for its own checkpoints.

The target: at most 5 % of the time, and no step waits for the disk. Steps that end with a checkpoint, and the steps
after them, during which the disk is written, are reported separately.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from _measure import RESULTS, Spread, alternate, readable, report, summary

import adaptive as ad
import collectives as comm

WIDTH, LAYERS, BATCH = 2500, 4, 400
EVERY, BLOCK, ROUNDS = 10, 20, 12
RNG = np.random.default_rng(0)
DATA = {"x": RNG.standard_normal((4096, WIDTH), np.float32)}
STEPS: dict[str, list[list[float]]] = {}  # by name and place behind a checkpoint, seconds


def loss_fn(params, batch):
    x = batch["x"]
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.square(x - batch["x"]).mean()


def driver(params, batch):
    loss, grads = comm.all_reduce(jax.value_and_grad(loss_fn)(params, batch))
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), {"loss": loss}


def new_program() -> ad.Program:
    params = {f"w{k}": RNG.standard_normal((WIDTH, WIDTH), np.float32) / 50 for k in range(LAYERS)}
    return ad.Program(driver, params, DATA, global_batch=BATCH, resizable=False)


def timed(name: str, block) -> object:
    """Take blocks of steps, and record each step's seconds by the number of steps since the last checkpoint."""
    STEPS[name] = [[] for _ in range(EVERY)]

    def run():
        for _ in range(BLOCK):
            start = time.perf_counter()
            steps = block()
            STEPS[name][steps % EVERY].append(time.perf_counter() - start)

    return run


def without():
    steps = new_program().run()
    return lambda: next(steps).step


def ours(directory: Path):
    program = new_program()
    steps = program.run(checkpoint=ad.Checkpoints(directory, every=EVERY))

    def step():
        number = next(steps).step
        if number % EVERY == 5:
            program._parts.run.checkpointer.wait()
        return number

    return step


def orbax(directory: Path, *, asynchronous: bool):
    program = new_program()
    options = ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=asynchronous)
    manager = ocp.CheckpointManager(directory, options=options)

    def step():
        number = program.step().step
        if number % EVERY == 0:
            manager.save(number, args=ocp.args.StandardSave(program.checkpoint()))
        if number % EVERY == 5:
            manager.wait_until_finished()
        return number

    return step


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        blocks = {
            "no checkpoints": without(),
            "ad.Checkpoints": ours(root / "ours"),
            "orbax's manager, asynchronous": orbax(root / "async", asynchronous=True),
            "orbax's manager, blocking": orbax(root / "blocking", asynchronous=False),
        }
        for block in blocks.values():
            while block() % EVERY != 5:
                pass
        calls = {name: timed(name, block) for name, block in blocks.items()}
        seconds = {name: block / BLOCK for name, block in alternate(calls, ROUNDS, warmup=1).items()}
    notes = []
    for name, steps in STEPS.items():
        each = [Spread.of(s).median for s in steps]
        others = float(np.median([s for place in steps[5:] for s in place]))
        behind = " ".join(readable(s) for s in each[1:5])
        notes.append(
            f"{name}: a step with a checkpoint {readable(each[0])}, the four behind it {behind}, others "
            f"{readable(others)} (medians)."
        )
    rows = [{"": row.name, **row.cells()} for row in summary(seconds)]
    report("Seconds of a step, with a checkpoint every ten", rows, RESULTS / "checkpoint_every_ten_steps.md", notes)


if __name__ == "__main__":
    main()
