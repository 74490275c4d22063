"""With a busy neighbor on one of two cores, balancing is never slower than equal batches, and near the ideal split.

    python benchmarks/balance_under_contention.py            # about 4 minutes; starts mpirun itself

Two ranks are pinned to two cores, and a process spins on the second core. Measured are an MLP with 8 examples per rank,
the MLP with steps of 3, 10, 30 and 60 ms (before the neighbor starts), and a conv net and a transformer block with
steps of 30 ms. Each run is a new job, in which a program with balance and one with equal batches alternate. (Aimed at:
at most 1.02 times the equal step; from 10 ms on at most 1.05 times the ideal one.)

The ideal is computed from the speeds measured with equal batches: the split with which both ranks finish together, plus
the part of a step that is not computing. A neighbor's time slices are noise, and a step waits for the slower rank, so
no split reaches the ideal.
"""

import numpy as np
from _balance_run import BLOCK, start
from _measure import command_line, readable, report

SMALLEST = 0.01  # milliseconds: less than 8 examples take
CASES = [
    *(("mlp", ms, steps) for ms, steps in ((SMALLEST, 2000), (3, 800), (10, 320), (30, 160), (60, 120))),
    *((model, 30, 160) for model in ("conv net", "transformer block")),
]


def judged(run: dict) -> dict[str, float]:
    """Return seconds per step with balance, with equal batches and ideally, and rank 0's share; without the first
    quarter.
    """
    skip = len(run["equal"]) // 4
    on, off, computed = (np.array(run[name])[skip:] for name in ("balanced", "equal", "computed"))
    per_example = computed.mean(axis=0) / run["local"]
    ideal = 2 * run["local"] / (1 / per_example).sum()
    rest = max(float(off.mean() - computed.mean(axis=0).max()), 0.0)  # exchange, update, hooks, whatever the split
    return {
        "on": float(on.mean()),
        "off": float(off.mean()),
        "ideal": ideal + rest,
        "hooks": float(np.mean(run["hooks"][skip:])),
        "size": ideal / per_example[0] / (2 * run["local"]),
        "last": run["sizes"][-1][0] / (2 * run["local"]),
    }


def row(model: str, milliseconds: float, runs: list[dict]) -> dict[str, str]:
    """Return a row of the table: the median run, and all runs."""
    found = [judged(run) for run in runs]
    over_equal, over_ideal = (sorted(f["on"] / f[to] for f in found) for to in ("off", "ideal"))
    return {
        "": f"{model}, {'8 examples' if milliseconds == SMALLEST else f'{milliseconds:g} ms'}",
        "equal": readable(float(np.median([f["off"] for f in found]))),
        "balanced": readable(float(np.median([f["on"] for f in found]))),
        "ideal": readable(float(np.median([f["ideal"] for f in found]))),
        "balanced / equal": f"{np.median(over_equal):.3f} ({over_equal[0]:.2f} – {over_equal[-1]:.2f})",
        "balanced / ideal": f"{np.median(over_ideal):.3f} ({over_ideal[0]:.2f} – {over_ideal[-1]:.2f})",
        "hooks, of the balanced step": f"{np.median([f['hooks'] / f['on'] for f in found]):.1%}",
        "rank 0's part at last (ideal)": ", ".join(f"{f['last']:.2f} ({f['size']:.2f})" for f in found),
    }


def main() -> None:
    """Measure and report."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first ones")
    parser.add_argument("--steps", type=int, help="of each case, instead of its own number")
    args = parser.parse_args()
    rows = []
    for model, ms, steps in CASES[: args.cases]:
        blocks = (args.steps or steps) // BLOCK
        rows.append(row(model, ms, [start(model, ms, blocks, busy=True) for _ in range(args.runs)]))
    notes = [
        f"{args.runs} runs of each, every one from a new start: medians, and the extremes. Means of the last three "
        "quarters of the steps, because a neighbor's time slices make a step either fast or slow; both programs in "
        f"turn, in blocks of {BLOCK} steps. Milliseconds are those of computing with equal batches, without it."
    ]
    report("Balancing against a busy neighbor", rows, args.write, notes)


if __name__ == "__main__":
    main()
