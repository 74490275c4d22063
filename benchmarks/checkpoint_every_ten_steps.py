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
from _measure import Spread, alternate, command_line, readable, report, summary

import adaptive as ad
import collectives as comm

LAYERS, BATCH = 4, 400
EVERY, BLOCK = 10, 20
RNG = np.random.default_rng(0)
STEPS: dict[str, list[list[float]]] = {}  # by name and place behind a checkpoint, seconds


def loss_fn(params, batch):
    x = batch["x"]
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.square(x - batch["x"]).mean()


def driver(params, batch):
    loss, grads = comm.all_reduce(jax.value_and_grad(loss_fn)(params, batch))
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), {"loss": loss}


def new_program(width: int) -> ad.Program:
    params = {f"w{k}": RNG.standard_normal((width, width), np.float32) / 50 for k in range(LAYERS)}
    data = {"x": RNG.standard_normal((4096, width), np.float32)}
    return ad.Program(driver, params, data, global_batch=BATCH, resizable=False)


def timed(name: str, block) -> object:
    """Take blocks of steps, and record each step's seconds by the number of steps since the last checkpoint."""
    STEPS[name] = [[] for _ in range(EVERY)]

    def run():
        for _ in range(BLOCK):
            start = time.perf_counter()
            steps = block()
            STEPS[name][steps % EVERY].append(time.perf_counter() - start)

    return run


def without(program: ad.Program):
    steps = program.run()
    return lambda: next(steps).step


def ours(program: ad.Program, directory: Path):
    steps = program.run(checkpoint=ad.Checkpoints(directory, every=EVERY))

    def step():
        number = next(steps).step
        if number % EVERY == 5:
            program._parts.run.checkpointer.wait()
        return number

    return step


def orbax(program: ad.Program, directory: Path, *, asynchronous: bool):
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
    parser = command_line(__doc__)
    parser.add_argument("--width", type=int, default=2500, help="of each of the four layers")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        blocks = {
            "no checkpoints": without(new_program(args.width)),
            "ad.Checkpoints": ours(new_program(args.width), root / "ours"),
            "orbax's manager, asynchronous": orbax(new_program(args.width), root / "async", asynchronous=True),
            "orbax's manager, blocking": orbax(new_program(args.width), root / "blocking", asynchronous=False),
        }
        for block in blocks.values():
            while block() % EVERY != 5:
                pass
        calls = {name: timed(name, block) for name, block in blocks.items()}
        seconds = {name: block / BLOCK for name, block in alternate(calls, args.rounds, warmup=1).items()}
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
    path = "checkpoint_every_ten_steps.md" if args.write else None
    report("Seconds of a step, with a checkpoint every ten", rows, path, notes)


if __name__ == "__main__":
    main()
