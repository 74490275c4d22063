"""Claim: of a source of 1.5 ms an example, processes that read hide all but what the cores allow: steps take at most
1.1 times that bound.

    mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/input_workers.py [--steps 20] [--rounds 3] [--workers 4]

Two kinds of source: one that waits (a disk, a network) and one that computes (decoding), by its own processor time. A
bound is what a step takes at least: of a source that waits, its computing or the waiting of a rank's share by so many
processes, whichever is more; of one that computes, all computing of all ranks on the cores there are. A step's own
computing is measured on the same driver with arrays. All are run in turn, in one job, some steps at a time; the first
of those are left out, since what they take was fetched while others ran.

The processor time is that of one rank and its readers, and what must be that of a step with arrays and of its reading:
it says what fetching costs also where neighbors take the cores, and a step's seconds say nothing.
"""

from __future__ import annotations

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from _measure import Spread, readable, report

import adaptive as ad
import collectives as comm

EXAMPLES, FEATURES, LOCAL_BATCH, SECONDS = 20_000, 256, 32, 1.5e-3
LEFT_OUT = 5


class StandbyLoop:
    """1.5 ms an example, in which no processor is needed."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        time.sleep(SECONDS)
        return {"x": np.full(FEATURES, index % 7, np.float32)}


class Computing(StandbyLoop):
    """1.5 ms of a processor an example."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        until = time.thread_time() + SECONDS
        while time.thread_time() < until:
            pass
        return {"x": np.full(FEATURES, index % 7, np.float32)}


def driver(w: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    def loss(w: jax.Array) -> jax.Array:
        x = batch["x"]
        for _ in range(40):
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    gradient, value = comm.all_reduce((gradient, value))
    return w - 1e-3 * gradient, {"loss": value}


def used() -> float:
    """Processor seconds of this process and of those that it has started."""
    each = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(p.cpu_times().user + p.cpu_times().system for p in each)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="processes that read, on all ranks together")
    args = parser.parse_args()
    with comm.world() as world:
        each = max(1, args.workers // world.processes)
        data = {"arrays": {"x": np.zeros((EXAMPLES, FEATURES), np.float32)}}
        for kind, source in (("waits", StandbyLoop()), ("computes", Computing())):
            data[f"{kind}, read in a thread"] = source
            data[f"{kind}, {args.workers} processes"] = ad.data.from_source(source, num_readers=each)
        state = jnp.eye(FEATURES) / 2
        programs = {
            name: ad.Program(driver, state, source, global_batch=LOCAL_BATCH * world.size, resizable=False)
            for name, source in data.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        processor: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(args.rounds):
            for name, program in programs.items():
                for step in program.run(steps=LEFT_OUT + args.steps):
                    if step.step % (LEFT_OUT + args.steps) == LEFT_OUT:
                        began, before = time.perf_counter(), used()
                seconds[name].append((time.perf_counter() - began) / args.steps)
                processor[name].append((used() - before) / args.steps)
        for program in programs.values():
            program.close()
        if world.rank == 0:
            say(seconds, processor, args.workers, each, world.size)


def say(
    seconds: dict[str, list[float]], processor: dict[str, list[float]], workers: int, each: int, ranks: int
) -> None:
    computing, reading = float(np.median(seconds["arrays"])), LOCAL_BATCH * SECONDS
    cores = os.cpu_count() or 1
    bounds = {
        "arrays": computing,
        "waits, read in a thread": max(computing, reading),
        f"waits, {workers} processes": max(computing, reading / each),
        "computes, read in a thread": max(computing + reading if ranks >= cores else reading, computing),
        f"computes, {workers} processes": max(computing, ranks * (computing + reading) / cores, reading / each),
    }
    rows, alone = [], float(np.median(processor["arrays"]))
    for name, sample in seconds.items():
        spread, took = Spread.of(sample), float(np.median(processor[name]))
        must = alone + reading * name.startswith("computes")
        rows.append(
            {
                "": name,
                "a step": readable(spread.median),
                "p10 – p90": f"{readable(spread.p10)} – {readable(spread.p90)}",
                "bound": readable(bounds[name]),
                "of the bound": f"{spread.median / bounds[name]:.2f}",
                "processor time": readable(took),
                "of what must be": f"{took / must:.2f}",
            }
        )
    notes = [
        f"{ranks} ranks on {cores} cores, batches of {LOCAL_BATCH} each; {SECONDS * 1e3:g} ms an example, so a rank's "
        f"share takes {readable(reading)} to read by one. {workers} processes read, {each} for each rank. Load average "
        f"{os.getloadavg()[0]:.0f}."
    ]
    report("Examples that take 1.5 ms to read", rows, "input_workers.md", notes)


if __name__ == "__main__":
    main()
