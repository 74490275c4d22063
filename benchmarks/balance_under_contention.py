"""With a busy neighbor on one of two cores, balancing is never slower than equal batches, and near the ideal split.

    python benchmarks/balance_under_contention.py            # about 4 minutes; starts mpirun itself

Two ranks pinned to two cores, and a process that spins on the second. An MLP with 8 examples a rank, and with steps of
3, 10, 30 and 60 ms (before the neighbor comes); a conv net and a transformer block with steps of 30 ms. Every run is
one from a new start. Within a run a program with balance and one with equal batches take turns. (Aimed at: never more
than 1.02 times the equal step; from 10 ms on at most 1.05 times the ideal one.)

The ideal is computed from measured speeds: with equal batches, how long each rank computes gives its seconds per
example, and the ideal split lets both finish together; what a step takes beside computing is added as it is. A
neighbor's time slices are noise, and a step waits for whoever is late: no split is as good as the ideal.
"""

import argparse

import numpy as np
from _balance_run import BLOCK, start
from _measure import readable, report

SMALLEST = 0.01  # milliseconds: less than 8 examples take
CASES = [
    *(("mlp", ms, steps) for ms, steps in ((SMALLEST, 2000), (3, 800), (10, 320), (30, 160), (60, 120))),
    *((model, 30, 160) for model in ("conv net", "transformer block")),
]


def judged(run: dict) -> dict[str, float]:
    """Of a run without its first quarter: seconds a step with balance, with equal batches, ideally; rank 0's part."""
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
    """Of the table: the middle of the runs, and all of them."""
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1)
    runs = parser.parse_args().runs
    rows = [
        row(model, ms, [start(model, ms, steps // BLOCK, busy=True) for _ in range(runs)]) for model, ms, steps in CASES
    ]
    notes = [
        f"{runs} runs of each, every one from a new start: medians, and the extremes. Means of the last three quarters "
        "of the steps, because a neighbor's time slices make a step either fast or slow; both programs in turn, in "
        f"blocks of {BLOCK} steps. Milliseconds are those of computing with equal batches, without the neighbor."
    ]
    report("Balancing against a busy neighbor", rows, "balance_under_contention.md", notes)


if __name__ == "__main__":
    main()
