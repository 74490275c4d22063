"""On two equal ranks, `balance` that is free to move leaves the step time unchanged. (Aimed at: 1.02.)

    python benchmarks/balance_where_it_should_not_move.py            # about 3 minutes; starts mpirun itself

An MLP with steps of about 1.5, 5 and 20 ms, three runs each, each a new job. Within a run the program with balance and
the one without alternate in blocks of 20 steps; the first quarter is left out. Sizes are free, and kernels are chosen
by measured time. Compared are means of blocks, which include the time that the policy itself takes.
"""

import argparse

import numpy as np
from _balance_run import BLOCK, start
from _measure import Spread, readable, report

STEPS = {1.5: 600, 5: 300, 20: 120}  # by milliseconds


def row(milliseconds: float, runs: list[dict]) -> dict[str, str]:
    """Return a row of the table: the median and the extremes of the runs."""
    ratios, seconds, changes = [], [], []
    for run in runs:
        blocks = {name: np.array(run[name]).reshape(-1, BLOCK).mean(axis=1) for name in ("balanced", "equal")}
        on, off = (seconds_of[len(seconds_of) // 4 :] for seconds_of in blocks.values())
        ratios.append(float(np.median(on / off)))
        seconds.append(float(np.median(off)))
        sizes = np.array(run["sizes"])
        changes.append(int((np.diff(sizes, axis=0) != 0).any(axis=1).sum()))
    return {
        "computing": f"about {milliseconds:g} ms",
        "step with balance off": readable(Spread.of(seconds).median),
        "with balance on, median of the runs": f"{np.median(ratios):.3f}",
        "all runs": ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios)),
        "changes of sizes": ", ".join(map(str, changes)),
        "last sizes": ", ".join("+".join(map(str, run["sizes"][-1])) for run in runs),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    rows = [row(ms, [start("mlp", ms, steps // BLOCK, busy=False) for _ in range(runs)]) for ms, steps in STEPS.items()]
    notes = [
        f"{runs} runs of each, every one from a new start: the median of the ratios of blocks of {BLOCK} steps, the "
        "two programs in turn. Two ranks on two cores, one thread each."
    ]
    report("Two equal ranks, free to move", rows, "balance_where_it_should_not_move.md", notes)


if __name__ == "__main__":
    main()
