"""The seconds of a training step by batch size, on one device: how little of a small batch's time is its examples.

    python benchmarks/seconds_per_batch.py [--write]

Each task of `best_static_batch.py`, in a plain jitted loop: with rows that are taken from arrays on the host in each
step, and with a batch that stays on the device. A block of steps is dispatched, and the clock stops when the last one
has ended. The table is also written as JSON, after each task: a model of one device's time, in which other scripts can
look up seconds. On a GPU most of the time goes into compiling: allow three minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _measure import RESULTS, machine, readable, report
from _static_batch_tasks import TASKS, PlainLoop, Task, task

BATCHES = tuple(2**k for k in range(4, 13))


def measured(of: Task, batch: int, rounds: int, block: int) -> dict[str, float]:
    """Return the median seconds of a step, with rows from the host and with a batch on the device."""
    loop, rng = PlainLoop(of, batch, of.lr, 0), np.random.default_rng(0)
    n = len(next(iter(of.train.values())))

    def from_host() -> Any:
        rows = rng.integers(0, n, batch)
        return {name: column[rows] for name, column in of.train.items()}

    there = jax.tree.map(jnp.asarray, from_host())
    ways = {"rows from the host": from_host, "batch on the device": lambda: there}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _, (name, fetch) in itertools.product(range(-1, rounds), ways.items()):
        seconds[name].append(_seconds(loop, fetch, block))
    return {name: float(np.median(found[1:])) for name, found in seconds.items()}


def _seconds(loop: PlainLoop, fetch: Callable[[], Any], block: int) -> float:
    jax.block_until_ready(loop.state)
    start = time.perf_counter()
    for _ in range(block):
        loop.step_on(fetch())
    jax.block_until_ready(loop.state)
    return (time.perf_counter() - start) / block


def main() -> None:
    """Measure and report."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--block", type=int, default=20, help="steps that are timed together")
    arguments.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    arguments.add_argument("--tasks", nargs="*", choices=TASKS, default=TASKS)
    arguments.add_argument("--write", action="store_true")
    args = arguments.parse_args()
    device, rows, found = jax.devices()[0].device_kind, [], {}
    for name in args.tasks:
        found[name] = {}
        for batch in args.batches:
            found[name][batch] = measured(task(name), batch, args.rounds, args.block)
            rows.append({"task": name, "batch": batch, **{way: readable(s) for way, s in found[name][batch].items()}})
            print(rows[-1], flush=True)
        if args.write:
            told = {"device": device, "machine": machine(), "seconds": found}
            (RESULTS / "seconds_per_batch.json").write_text(json.dumps(told, indent=1) + "\n")
    notes = [f"{device}; medians of {args.rounds} blocks of {args.block} steps."]
    report("Seconds of a step by batch size", rows, "seconds_per_batch.md" if args.write else None, notes)


if __name__ == "__main__":
    main()
