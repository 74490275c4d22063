"""A worker that is started from nothing joins, no step takes 1.5 times as long, and the stall is that of a small state.

    python benchmarks/new_worker.py [--jobs 3] [--mebibytes 1 96 1024]

Two ranks train; after 40 steps `rescale(workers=3)` has a third process spawned (`max_workers=3`), which imports,
builds its program, compiles, and receives the state. Each example waits 0.5 ms, as a host waits for its accelerator, so
that a step of 100 examples per worker takes some 50 ms and three processes fit on two cores.

"Meanwhile" is a step between the request and the change, and "the switch" the step in which the members change, each
relative to the median of the 30 steps before the request, on the slower of the two ranks. "Stalled" is what the switch
takes longer than that median, "transfer" the part of it that sends the state. `--rank` runs the part of each rank.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy as np
from _elastic import Notes, job
from _measure import readable, report

FEW, MANY, ASKED, BEFORE, AFTER = 2, 3, 40, 30, 20
LOCAL_BATCH, EXAMPLES, WAIT = 100, 6000, 0.5e-3


def rank(folder: str, mebibytes: int) -> None:
    """Train on this rank, and request another worker after `ASKED` steps."""
    notes = Notes(folder)
    import jax
    import jax.numpy as jnp

    import adaptive as ad
    import collectives as comm
    from adaptive.program.membership_changes import MembershipChanges

    notes.around(MembershipChanges, "transfer_state")

    def wait(x: Any) -> np.ndarray:
        time.sleep(WAIT * len(x))
        return np.float32(0)

    def driver(state: Any, batch: Any) -> Any:
        waited = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), batch["x"])
        grads = jax.grad(lambda w: ((batch["x"] @ w) ** 2).mean())(state["w"])
        grads = comm.all_reduce(grads + waited)
        return {**state, "w": state["w"] - 0.1 * grads}, {}

    def state() -> Any:
        return {"w": jnp.zeros(16), "rest": [jnp.zeros(1 << 18, jnp.float32) for _ in range(mebibytes)]}

    data = {"x": np.random.default_rng(0).random((EXAMPLES, 16), np.float32)}
    with comm.world(max_workers=MANY) as world:
        program = ad.Program(driver, state, data, global_batch=FEW * LOCAL_BATCH, world=world)
        program.warm_up()
        left = AFTER
        for step in program.run():
            there = len(step.members)
            notes.take("step", step=step.step, seconds=step.seconds, workers=there)
            if step.step == ASKED:
                program.rescale(workers=MANY)
            left -= there == MANY
            if not left:
                break


def join_of(notes: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return what the join cost the slower one of the ranks that were there."""
    found = []
    for lines in notes:
        steps = [line for line in lines if line["kind"] == "step"]
        if steps[0]["step"] != 1:
            continue
        switch = next(step for step in steps if step["workers"] == MANY)
        usual = float(np.median([s["seconds"] for s in steps if ASKED - BEFORE < s["step"] <= ASKED]))
        until = [s for s in steps if ASKED < s["step"] < switch["step"]]
        began = switch["t"] - switch["seconds"]
        sent = [line["seconds"] for line in lines if line["kind"] == "transfer_state" and line["t"] > began]
        found.append({
            "usual": usual,
            "meanwhile": [s["seconds"] / usual for s in until],
            "switch": switch["seconds"] / usual,
            "stalled": switch["seconds"] - usual,
            "transfer": sent[0],
            "after": sum(s["seconds"] for s in until),
        })  # fmt: skip
    return max(found, key=lambda join: join["stalled"])


def row(mebibytes: int, joins: list[dict[str, Any]]) -> dict[str, object]:
    """Return the line of the table for one size of state."""
    meanwhile = np.concatenate([join["meanwhile"] for join in joins])

    def median(name: str) -> float:
        return float(np.median([join[name] for join in joins]))

    return {
        "state": f"{mebibytes} MiB",
        "joins": len(joins),
        "a step": readable(median("usual")),
        "joined after": readable(median("after")),
        "meanwhile": f"{np.median(meanwhile):.2f} (p99 {np.percentile(meanwhile, 99):.2f})",
        "longest": f"{meanwhile.max():.2f}",
        "the switch": f"{median('switch'):.2f} (worst {max(join['switch'] for join in joins):.2f})",
        "stalled": readable(median("stalled")),
        "transfer": readable(median("transfer")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", metavar="FOLDER")
    parser.add_argument("--of", type=int, default=0, metavar="MEBIBYTES")
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[1, 96, 1024])
    parser.add_argument("--jobs", type=int, default=3, help="for each size of state")
    args = parser.parse_args()
    if args.rank:
        rank(args.rank, args.of)
        return
    rows, load = [], []
    for mebibytes in args.mebibytes:
        joins = []
        for _ in range(args.jobs):
            with job(FEW, __file__, ["--of", mebibytes], more=["--oversubscribe"]) as running:
                joins.append(join_of(running.finished()))
            load.append(os.getloadavg()[0])
        rows.append(row(mebibytes, joins))
        print(rows[-1], flush=True)
    notes = [
        f"Two ranks, the spawned process and a launcher share {os.cpu_count()} cores. Load averages at the ends of "
        f"jobs: {min(load):.0f} to {max(load):.0f}.",
    ]
    report("What a worker that is started from nothing costs the others", rows, "new_worker.md", notes)


if __name__ == "__main__":
    main()
