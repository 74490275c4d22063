"""The cost of a step relative to a hand-written loop's, in time and in page faults.

    MALLOC_TRIM_THRESHOLD_=536870912 MALLOC_MMAP_THRESHOLD_=33554432 PJRT_NPROC=1 \
        mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/overhead_of_a_step.py

By hand: a jitted gradient into one flat buffer, one Allreduce in place, a jitted update. A program adds the weighting
by examples, the checks for values that are not finite and the comparison of decisions; in rows of its own also the
noise scale and the balancing hook. All take their batches from the same arrays by fancy indexing, and blocks of steps
alternate.

The targets: 1.02 times a step of 2 to 20 ms, 1.04 times with noise scale and balancing, and 1.15 times a step of 0.5
ms. XLA allocates and frees the memory of its temporaries in every call. Where the top of glibc's heap is free after a
step, glibc may return it to the system and fault it in again, megabytes at a time, on either side, depending on the
layout of the heap. The two thresholds keep that memory on both sides. (Set both: one alone turns off the adjustment of
the other, and both sides fault in over a thousand pages per step.) Page faults are counted to show this.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

import jax
import numpy as np
from _loops import RANKS, ByHand, program
from _measure import alternate, command_line, pin, readable, report, summary
from _timed_models import models

import collectives as comm

PLAIN, MONITORED = "ours", "ours, noise scale and balancing"


def counted(steps: Callable[[int], object], block: int, faults: list[float]) -> Callable[[], object]:
    """Wrap a block of steps so that it records the page faults per step."""

    def counting() -> object:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        result = jax.block_until_ready(steps(block))
        faults.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / block)
        return result

    return counting


def main() -> None:
    args = command_line(
        __doc__, rounds=25, block=(20, "steps that are timed together"), only=("", "models whose names contain this")
    ).parse_args()
    cores = sorted(os.sched_getaffinity(0))
    pin(cores[RANKS.rank % len(cores)])

    rows, notes = [], []
    with comm.world() as world:
        for model in models():
            if args.only not in model.name:
                continue
            programs = {name: program(model, world, monitored=name == MONITORED) for name in (PLAIN, MONITORED)}
            ways = {"by hand": ByHand(model).steps} | {
                name: lambda n, p=p: list(p.run(steps=n))[-1].metrics["loss"] for name, p in programs.items()
            }
            faults: dict[str, list[float]] = {name: [] for name in ways}
            calls = {name: counted(way, args.block, faults[name]) for name, way in ways.items()}
            seconds = alternate(calls, args.rounds, warmup=3)
            for row in summary({name: s / args.block for name, s in seconds.items()}):
                more = (seconds[row.name] - seconds["by hand"]) / args.block
                cells = {
                    "over by hand": readable(float(np.median(more))),
                    "page faults a step, rank 0": f"{np.mean(faults[row.name][-args.rounds :]):.1f}",
                }
                rows.append({"step": model.name, "local batch": model.local_batch, **row.cells(), **cells})
            for p in programs.values():
                p.close()
    if RANKS.rank == 0:
        notes.append(
            f"{RANKS.size} ranks, one core and one thread each; {args.rounds} rounds of {args.block} steps, each "
            "block a call of `run()`. "
            "Balancing is computed, but workers may take no more than they have, so that all run the same kernels on "
            "the same sizes. Over by hand: median of the differences round by round."
        )
        kept = os.environ.keys() >= {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
        notes.append(f"Freed memory is {'kept' if kept else 'returned to the system as glibc sees fit'}, on all sides.")
        report("What a step costs over a hand-written loop's", rows, args.write, notes)


if __name__ == "__main__":
    main()
