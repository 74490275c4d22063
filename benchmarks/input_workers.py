"""With a source of 1.5 ms per example and reader processes, steps take at most 1.1 times the bound set by the cores.

    mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/input_workers.py [--steps 20] [--rounds 3] [--workers 4]

There are two kinds of source: one that waits (a disk, a network) and one that computes (decoding), measured by its
processor time. The bound is the least time of a step. With a source that waits, it is the larger of the step's own
computing and the waiting for a rank's share divided by the number of processes; with one that computes, it is all
computing of all ranks divided by the number of cores. A step's own computing is measured with arrays as the data. All
cases alternate in one job. The first steps of each turn use examples fetched before, and are left out.

The processor time of one rank and its readers is reported next to the sum of a step with arrays and of the reading. It
shows the cost of fetching also where other processes take the cores, and step times say little.
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


class Waiting:
    """A source that waits for 1.5 ms per example without using the processor."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        time.sleep(SECONDS)
        return {"x": np.full(FEATURES, index % 7, np.float32)}


class Computing(Waiting):
    """A source that computes for 1.5 ms per example."""

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
    """Return the processor seconds of this process and its child processes."""
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
        for kind, source in (("waits", Waiting()), ("computes", Computing())):
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
