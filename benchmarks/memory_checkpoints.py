"""Claim: a copy of the state in memory each step costs at most 2 % of a step, and so do continuous checkpoints on disk.
When all members are lost, the reserve takes the next step at most 1 s later, and at most one step is lost.

    python benchmarks/memory_checkpoints.py [--rounds 12] [--kills 3]

Cost: two workers train, and a third process is in reserve. Blocks of steps run in turn, in one program: without
checkpoints, with a copy in memory each step (`memory_every=1`), and with checkpoints on disk, one after another
(`every="continuous"`). A block ends when what it has begun is on the disk. On a busy machine the processor time of
rank 0, which copies, says more than the seconds: it includes all that is hidden behind kernels.
The states: 1.6 MB with steps of some 5 ms; 100 MB, four matrices of 2500 x 2500, with steps of some hundred ms.

Losses: both workers are killed by SIGKILL at the same step, with two processes in reserve. Late is the time from the
kill to the end of the first step that the reserve takes, less a median step. Then the same without a reserve, started
again by `adaptive run --restarts` from a checkpoint on disk of every ten steps; late includes imports and compiling.
`--rank` is what each rank runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from itertools import pairwise
from typing import Any

import numpy as np
from _elastic import Notes, job, monitored
from _measure import RESULTS, readable, report, summary

WAYS = ("no checkpoints", "memory, each step", "disk, continuous")
WIDTH, LAYERS, BATCH = 2500, 4, 200
BLOCK = {"1.6 MB": 50, "100 MB": 4}  # steps
DIES = {"1.6 MB": 60, "100 MB": 20}  # after this step
NEVER = 1 << 62


def wide(world: Any) -> Any:
    """A program whose state has 100 MB."""
    import jax
    import jax.numpy as jnp

    import adaptive as ad
    import collectives as comm

    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((2048, WIDTH), np.float32)}
    params = {f"w{k}": rng.standard_normal((WIDTH, WIDTH), np.float32) / 50 for k in range(LAYERS)}

    def loss_fn(params, batch):
        x = batch["x"]
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.square(x - batch["x"]).mean()

    def driver(params, batch):
        loss, grads = comm.all_reduce(jax.value_and_grad(loss_fn)(params, batch))
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), {"loss": loss}

    return ad.Program(driver, params, data, world=world, global_batch=BATCH, resizable=False)


def new_program(world: Any, size: str) -> Any:
    return wide(world) if size == "100 MB" else monitored(world, workers=2)


def rank_of_cost(folder: str, size: str, rounds: int, block: int) -> None:
    """On each rank: train in blocks, and note their seconds."""
    import adaptive as ad
    import collectives as comm
    from adaptive.program.run_checkpointer import RunCheckpointer

    notes, way = Notes(folder), WAYS[0]
    due = RunCheckpointer._is_due_here
    RunCheckpointer._is_due_here = lambda self: way == WAYS[2] and due(self)
    steps = 2 * block + len(WAYS) * rounds * block
    with comm.world(workers=2) as world, tempfile.TemporaryDirectory() as disk:
        program = new_program(world, size)
        program.warm_up()
        checkpoint = ad.Checkpoints(disk, every="continuous", keep=1, memory=1, memory_every=1)
        began, used = time.perf_counter(), time.process_time()
        for report_ in program.run(steps=steps, checkpoint=checkpoint):
            if report_.step % block == 0:
                program._parts.run.checkpointer.wait()
                if report_.step > 2 * block:
                    processor = time.process_time() - used
                    notes.take(
                        "block", way=way, seconds=time.perf_counter() - began, processor=processor, rank=world.rank
                    )
                number = max(0, report_.step - 2 * block) // block
                way = WAYS[(number // len(WAYS) + number) % len(WAYS)]
                program._parts.copies._every = 1 if way == WAYS[1] else NEVER
                began, used = time.perf_counter(), time.process_time()


def rank_of_losses(folder: str, size: str, disk: str) -> None:
    """On each rank: train; the first members are killed."""
    import adaptive as ad
    import collectives as comm

    notes = Notes(folder)
    options = {} if disk else {"workers": 2}
    checkpoint = ad.Checkpoints(disk, every=10) if disk else ad.Checkpoints(memory=1, memory_every=1)
    with comm.world(**options) as world:
        program = new_program(world, size)
        program.warm_up()
        if disk:
            program.restore(disk, missing_ok=True)
        first = program.steps == 0
        for report_ in program.run(steps=DIES[size] + 5 - program.steps, checkpoint=checkpoint):
            notes.take("step", step=report_.step)
            if report_.step == DIES[size] and first and not world.losses and world.workers[0] < 2:
                if disk:
                    program._parts.run.checkpointer.wait()
                notes.take("kill")
                os.kill(os.getpid(), signal.SIGKILL)


def cost(rounds: int) -> list[dict[str, object]]:
    """Measure what checkpoints cost."""
    rows = []
    for size, block in BLOCK.items():
        with job(3, __file__, ["cost", size, rounds, block]) as under_way:
            ranks = under_way.finished()
        blocks = [note for notes in ranks for note in notes if note["kind"] == "block" and note["rank"] == 0]
        of = {way: [b for b in blocks if b["way"] == way] for way in WAYS}
        seconds = {way: np.array([b["seconds"] / block for b in of[way]]) for way in WAYS}
        processor = summary({way: np.array([b["processor"] for b in of[way]]) for way in WAYS})
        for row, by_processor in zip(summary(seconds), processor, strict=True):
            paired = f"{by_processor.paired_ratio.median:.3f}"
            rows.append({"": row.name, "state": size, **row.cells(), "processor time, paired": paired})
    return rows


def losses(kills: int) -> list[dict[str, object]]:
    """Measure how late the next step is when all members are killed."""
    rows = []
    for size, restarts in (("1.6 MB", False), ("100 MB", False), ("1.6 MB", True)):
        late, repeated = [], []
        for _ in range(kills):
            with tempfile.TemporaryDirectory() as disk:
                options = ["losses", size, *([disk] if restarts else [])]
                n = 2 if restarts else 4
                with job(n, __file__, options, more=["--restarts", "2"] if restarts else []) as under_way:
                    ranks = under_way.finished()
            flat = sorted((note for notes in ranks for note in notes), key=lambda note: note["t"])
            killed = max(note["t"] for note in flat if note["kind"] == "kill")
            before = [note["t"] for note in flat if note["kind"] == "step" and note["t"] < killed]
            after = [note for note in flat if note["kind"] == "step" and note["t"] > killed]
            late.append(after[0]["t"] - killed - float(np.median([b - a for a, b in pairwise(before)])))
            repeated.append(DIES[size] - after[0]["step"] + 1)
        rows.append(
            {
                "what goes on": "the launcher's next start, from disk" if restarts else "the reserve, from memory",
                "state": size,
                "kills": kills,
                "late: median": readable(float(np.median(late))),
                "worst": readable(max(late)),
                "steps repeated, at most": max(repeated),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--part", choices=["cost", "losses"])
    parser.add_argument("--rank", nargs="+")
    arguments = parser.parse_args()
    if arguments.rank:
        folder, what, size, *rest = arguments.rank
        if what == "cost":
            rank_of_cost(folder, size, int(rest[0]), int(rest[1]))
        else:
            rank_of_losses(folder, size, rest[0] if rest else "")
        return
    load = f"Load averages: {os.getloadavg()[0]:.0f} at the beginning"
    if arguments.part != "losses":
        rows, note = cost(arguments.rounds), f"{load}, {os.getloadavg()[0]:.0f} at the end."
        report("What copies in memory and continuous checkpoints cost", rows, RESULTS / "memory_checkpoints.md", [note])
    if arguments.part != "cost":
        rows, note = losses(arguments.kills), f"{load}, {os.getloadavg()[0]:.0f} at the end."
        report("When all members are killed", rows, RESULTS / "all_members_lost.md", [note])


if __name__ == "__main__":
    main()
