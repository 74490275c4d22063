"""Count the Python functions that a step calls, by package and by file. The machine's load does not matter.

    mpirun --oversubscribe -n 2 python -m mpi4py benchmarks/calls_of_a_step.py

After a long kernel the caches are cold, so the time of Python code between two kernels depends on the number of
function calls and on the amount of code they touch. `sys.setprofile` counts calls on rank 0; up to Python 3.11
comprehensions count as calls. The loop by hand has two jitted functions, the exchange, and a batch by fancy indexing.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _loops import RANKS, ByHand, perceptron, program
from _measure import report

import adaptive as ad
import collectives as comm

ROOT = Path(ad.__file__).resolve().parent.parent
WARM = 40  # steps before the first that is counted


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str]]]:
    """Count the functions called within the block, by file and name."""
    calls: Counter[tuple[str, str]] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def room(path: str) -> str:
    """Return the package of this repository that a file is in, or the library: "adaptive.runtime", "jax"."""
    try:
        inside = Path(path).resolve().relative_to(ROOT).with_suffix("").parts
    except ValueError:
        parts = Path(path).parts
        return parts[parts.index("site-packages") + 1] if "site-packages" in parts else "Python"
    return ".".join(inside[:2])


def steps_of(p: ad.Program, count: int) -> Callable[[], None]:
    """Return a function that takes steps of one run; the first steps are taken now."""
    run = p.run(steps=WARM + count + 1)
    for _ in range(WARM):
        next(run)

    def take() -> None:
        for _ in range(count):
            next(run)

    return take


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--write", action="store_true", help="write benchmarks/results")
    arguments.add_argument("--functions", action="store_true", help="print each function")
    options = arguments.parse_args()
    model, loop = perceptron("perceptron", 32), ByHand(perceptron("perceptron", 32))
    loop.steps(WARM)
    ways: dict[str, Callable[[], object]] = {"by hand": lambda: loop.steps(options.steps)}
    rows = []
    with comm.world() as world:
        programs = {
            "ours": program(model, world, monitored=False),
            "ours, noise scale and balancing": program(model, world, monitored=True),
        }
        for name, p in programs.items():
            ways[name] = steps_of(p, options.steps)
        for name, take in ways.items():
            with counted() as calls:
                take()
            rooms: Counter[str] = Counter()
            for (path, _), number in calls.items():
                rooms[room(path)] += number
            files = len({path for path, _ in calls})
            where = ", ".join(f"{place} {number / options.steps:.1f}" for place, number in rooms.most_common())
            total = sum(calls.values()) / options.steps
            rows.append(
                {"step": name, "calls": f"{total:.1f}", "functions": len(calls), "files": files, "where": where}
            )
            if options.functions and RANKS.rank == 0:
                for (path, function), number in sorted(calls.items()):
                    print(f"{number / options.steps:8.2f}  {room(path)}  {function}")
        for p in programs.values():
            p.close()
    if RANKS.rank == 0:
        notes = [
            f"{RANKS.size} ranks, means of {options.steps} steps of one `run()`; functions and files: in all of them."
        ]
        report("Functions of Python that a step calls", rows, "calls_of_a_step.md" if options.write else None, notes)


if __name__ == "__main__":
    main()
