"""Where a step's time goes: ours, with and without noise scale and balancing, beside a hand-written loop's.

    MALLOC_TRIM_THRESHOLD_=536870912 MALLOC_MMAP_THRESHOLD_=33554432 PJRT_NPROC=1 \\
        mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/a_step_taken_apart.py

The library is timed from outside: its methods are wrapped, and at each entry and exit the time since the last one is
charged to the part that was running, so parts add up to the step. XLA is told to compute where it is called, and not
in a thread of its own, and waited for where it does so all the same, or on one core the kernel would be charged to
whatever Python does beside it. Seconds are those of the core (`process_time`), so other processes do not count, but
what they drive out of the caches does. What the wrapping itself takes, about two microseconds for each entry, is in the
parts.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import jax
import numpy as np
from _loops import RANKS, ByHand, Model, models, program
from _measure import pin, report

import adaptive as ad
import collectives as comm

DATA, CALL, WAIT, EXCHANGE, FRAME, REDUCE = "data", "call kernel", "waiting for it", "exchange", "frame", "pieces"
LOOK, NANS, FINAL, HOOKS, REST = (
    "look for non-finite",
    "flags of new NaNs",
    "final kernel",
    "hooks",
    "all else in Python",
)
PARTS = [DATA, CALL, WAIT, EXCHANGE, FRAME, REDUCE, LOOK, NANS, FINAL, HOOKS, REST]


class Clock:
    """Seconds of the core and page faults of a step, by part."""

    def __init__(self) -> None:
        self._running = [REST]
        self._since, self._faults = 0.0, 0
        self.steps: list[dict[str, float]] = []
        self.faults: list[int] = []

    def step(self, take: Callable[[], Any]) -> None:
        """Take one step, and keep what its parts took."""
        self._parts: dict[str, float] = defaultdict(float)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._since = time.process_time()
        take()
        self._charge()
        self.steps.append(dict(self._parts))
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

    def around(self, part: str, function: Callable) -> Callable:
        """The function, what it takes charged to a part."""

        @wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            self._charge()
            self._running.append(part)
            try:
                return function(*args, **options)
            finally:
                self._charge()
                self._running.pop()

        return timed

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Charge what a method of an object takes to a part."""
        setattr(owner, name, self.around(part, getattr(owner, name)))

    def _charge(self) -> None:
        now = time.process_time()
        if hasattr(self, "_parts"):
            self._parts[self._running[-1]] += now - self._since
        self._since = now


def waited_for(run: Callable) -> Callable:
    """A compiled program that returns when it is done."""
    return lambda *args: jax.block_until_ready(run(*args))


def of_by_hand(model: Model) -> tuple[Clock, Callable[[], Any]]:
    """The hand-written loop, timed."""
    clock, loop = Clock(), ByHand(model)
    loop.gradient, loop.update = waited_for(loop.gradient), waited_for(loop.update)
    for name, part in (("fetch", DATA), ("gradient", CALL), ("receive", WAIT), ("exchange", REDUCE), ("update", FINAL)):
        clock.wrap(loop, name, part)
    return clock, lambda: jax.block_until_ready(loop.steps(1))


def of_program(p: ad.Program, world: Any) -> tuple[Clock, Callable[[], Any]]:
    """A program, timed: all of these are its own names for its parts."""
    clock, engine = Clock(), p._engine
    clock.wrap(p._stream, "take", DATA)
    clock.wrap(p._stream, "prefetch", DATA)
    clock.wrap(engine, "made_nans", NANS)
    clock.wrap(p._hooks, "run", HOOKS)
    for look in engine.looks:
        clock.wrap(look, "passes", LOOK)
    for key, run in engine._compiled.items():
        engine._compiled[key] = clock.around(FINAL if key[0] == "final" else CALL, waited_for(run))
    for worker in engine.kernels._workers:
        for kernels in worker.ready.values():
            kernels.update(
                {level: replace(k, run=clock.around(CALL, waited_for(k.run))) for level, k in kernels.items()}
            )
    return clock, lambda: jax.block_until_ready(p.step().metrics)


def exchange_timed(world: Any, clock: Clock) -> Callable[[], None]:
    """Charge the world's parts to a clock; what is returned takes that back."""
    names = {"exchange": EXCHANGE, "_meet": FRAME, "_reduce": REDUCE}
    for name, part in names.items():
        clock.wrap(world, name, part)

    def undo() -> None:
        for name in names:
            delattr(world, name)

    return undo


def table_of(clocks: dict[str, Clock], skip: int) -> list[dict[str, str]]:
    """A row for each part; p10 and median over steps, in microseconds."""
    rows = []
    for part in [*PARTS, "all"]:
        row, any_time = {"part": part}, False
        for name, clock in clocks.items():
            took = [1e6 * (sum(s.values()) if part == "all" else s.get(part, 0.0)) for s in clock.steps[skip:]]
            p10, median = np.percentile(took, [10, 50])
            row[name] = f"{p10:.0f} / {median:.0f}" if median else ""
            any_time = any_time or bool(median)
        rows += [row] if any_time else []
    faults = {}
    for name, clock in clocks.items():
        found = clock.faults[skip:]
        faults[name] = f"{np.percentile(found, 10):.0f} / {np.mean(found):.1f}"
    return [*rows, {"part": "page faults (p10 / mean)", **faults}]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--block", type=int, default=20, help="steps before it is the next one's turn")
    arguments.add_argument("--only", default="", help="models whose names hold this; nothing is written then")
    options = arguments.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    cores = sorted(os.sched_getaffinity(0))
    pin(cores[RANKS.rank % len(cores)])
    rows: list[dict[str, str]] = []
    with comm.world() as world:
        for model in models():
            if options.only not in model.name:
                continue
            programs = [program(model, world, monitored=monitored) for monitored in (False, True)]
            ways = dict(
                zip(
                    ("by hand", "ours", "ours, noise scale and balancing"),
                    (of_by_hand(model), *(of_program(p, world) for p in programs)),
                    strict=True,
                )
            )
            for _ in range(-(-options.steps // options.block) + 1):
                for clock, take in ways.values():
                    undo = exchange_timed(world, clock)
                    for _ in range(options.block):
                        RANKS.Barrier()  # else one rank's delay is the other one's wait
                        clock.step(take)
                    undo()
            found = table_of({name: clock for name, (clock, _) in ways.items()}, skip=options.block)
            rows += [{"step": model.name if i == 0 else "", **row} for i, row in enumerate(found)]
            for p in programs:
                p.close()
    if RANKS.rank == 0:
        notes = [
            f"Microseconds of rank 0's core, p10 / median of {options.steps} steps, in turn by blocks of "
            f"{options.block}. Parts are exclusive: the exchange is without its frame and its pieces. The frame "
            "waits for the other rank.",
        ]
        report("A step, taken apart", rows, None if options.only else "a_step_taken_apart.md", notes)


if __name__ == "__main__":
    main()
